"""Command line of the benchmark: what to measure. Arguments are checked here, before any memory is allocated."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.worker.memory import GIB, default_pool
from sglang_hybrid import container
from sglang_hybrid.config import ConfigError, HybridConfig
from sglang_hybrid.ops.cpu import variants
from sglang_hybrid.ops.cpu.structs import DTYPES as _QUERY_DTYPES
from sglang_hybrid.ops.cpu.structs import FP8_POOL, dtype_code
from sglang_hybrid.protocol.cores import Topology

_DESCRIPTION = """\
Measures what the CPU worker gets out of this host's memory: GB/s of block attention, posted and collected through a
mailbox as a server does it, for each number of threads, blocks per task, dtype and kernel variant; beside what plain
reading gets from the same memory with the same threads, and the torch provider. Then the round trip of one posted layer
that has nothing to compute. Prints a table and writes everything to a JSON file.

The numbers mean something only on a host that does nothing else.
"""
PROVIDERS = ("torch", "ipex")  # the worker's providers beside native; ipex needs requirements/ipex.txt's environment
DTYPES = (*_QUERY_DTYPES, FP8_POOL)  # dtypes of pools
_MOST_BLOCKS = 4096
_MOST_OF_AVAILABLE = 0.9  # the rest is for mailboxes, tensors and other processes


@dataclass(frozen=True)
class Settings:
    kv_heads: int
    group: int
    head_dim: int
    dtypes: tuple[str, ...]
    variants: tuple[str, ...]
    threads: tuple[int, ...]  # ascending
    blocks: tuple[int, ...]  # blocks per task, ascending
    pool_bytes: int
    seconds: float  # duration of one measurement, after its warm-up
    out: Path
    providers: tuple[str, ...] = ("torch",)  # measured beside the native kernels

    def page_bytes(self, itemsize: int) -> int:
        """Return the bytes of the keys of one page. The values of a page take as many."""
        return self.kv_heads * 32 * self.head_dim * itemsize


def parse(argv: Sequence[str], topology: Topology) -> Settings:
    """Parse the command line. End the process with a message if this host cannot do what the arguments ask for.

    Raise NativeError if the CPU library cannot be loaded.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    here, most = variants(), _most_threads(topology)
    chosen = Settings(
        kv_heads=given.kv_heads,
        group=given.group,
        head_dim=given.head_dim,
        dtypes=given.dtypes or (("bfloat16",) if given.quick else DTYPES),
        variants=given.variants or tuple(here),
        threads=given.threads or _default_threads(most, given.quick),
        blocks=given.blocks or ((1, 8, 32) if given.quick else (1, 2, 4, 8, 16, 32)),
        pool_bytes=_pool_bytes(parser, given.pool, given.quick),
        seconds=given.seconds or (0.2 if given.quick else 0.5),
        out=given.out,
        providers=given.providers,
    )
    if unknown := [name for name in chosen.variants if name not in here]:
        parser.error(f"variant {unknown[0]!r} cannot run on this machine, which has {', '.join(here)}")
    if chosen.threads[-1] > len(topology.cpus):
        parser.error(f"{chosen.threads[-1]} threads: this process may use {len(topology.cpus)} CPUs")
    page = chosen.page_bytes(4 if "float32" in chosen.dtypes else 2)
    if (pages := chosen.pool_bytes // 2 // page) < chosen.blocks[-1]:
        parser.error(
            f"a pool of {chosen.pool_bytes >> 20} MiB has {pages} pages, too few for {chosen.blocks[-1]} different ones"
            f" in a list: raise --pool to {-(-2 * page * chosen.blocks[-1] >> 20)}MiB, or lower --blocks"
        )
    if not chosen.out.resolve().parent.is_dir():  # check now, not after minutes of measuring
        parser.error(f"--out {chosen.out}: there is no directory {chosen.out.resolve().parent}")
    return chosen


def query_dtype(dtype: str) -> str:
    """Return the dtype of queries that attend to a pool of ``dtype``."""
    return "bfloat16" if dtype == FP8_POOL else dtype


def kernel_dtype(dtype: str) -> int:
    """Return the kernels' code for a pool of ``dtype`` and its queries (DType in block_attention.h)."""
    return dtype_code(dtype, query_dtype(dtype))


def _most_threads(topology: Topology) -> int:
    """Return one thread per physical core, limited by the container's CPU quota: more threads would only wait."""
    cores = len(topology.cores)
    return cores if topology.quota is None else max(1, min(cores, int(topology.quota)))


def _default_threads(most: int, quick: bool) -> tuple[int, ...]:
    doubling = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*(doubling[:1] if quick else doubling), most)


def _pool_bytes(parser: argparse.ArgumentParser, text: str, quick: bool) -> int:
    available = container.memory().available
    if text == "auto":
        size = default_pool(available, quick)
        if not size:
            parser.error(
                f"{available / GIB:.2f} GiB of memory are available, too little for a pool that is larger than the "
                "caches: free some, or choose a smaller one with --pool (caches will then help)"
            )
        return size
    try:
        size = HybridConfig(host_memory=text).host_memory_bytes(available)
    except ConfigError:
        parser.error(f'--pool {text!r}: must be "auto", a size such as "8GiB" or "512MiB", or a percentage of the '
                     'available memory such as "25%"')  # fmt: skip
    if size > available * _MOST_OF_AVAILABLE:
        parser.error(
            f"--pool {text} asks for {size / GIB:.2f} GiB, but only {available / GIB:.2f} GiB of memory are available: "
            f"choose at most {_MOST_OF_AVAILABLE:.0%} of that, or free some"
        )
    return size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid bench worker",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="less of everything: bfloat16, one thread and all, 1, 8 and 32 blocks")
    add("--threads", type=_numbers(1, 4096), metavar="N,N", help="default: 1, 2, 4 and so on up to the physical cores")
    add("--blocks", type=_numbers(1, _MOST_BLOCKS), metavar="N,N", help="blocks per task (default: 1,2,4,8,16,32)")
    add("--dtypes", type=_names("dtype", DTYPES), metavar="NAME,NAME", help=f"of {', '.join(DTYPES)} (default: all)")
    add("--variants", type=_names("variant"), metavar="NAME,NAME", help="of the kernel (default: all of this machine)")
    add(
        "--providers",
        type=_names("provider", PROVIDERS),
        default=("torch",),
        metavar="NAME,NAME",
        help=f"to compare the kernels with, of {', '.join(PROVIDERS)} (default: torch)",
    )
    add("--kv-heads", type=_number(1, 256), default=8, metavar="N", help="default: %(default)s, as Qwen3-14B has")
    add("--group", type=_number(1, 16), default=5, metavar="N", help="query heads per KV head (default: %(default)s)")
    add("--head-dim", type=int, choices=(64, 96, 128, 256), default=128, help="default: %(default)s")
    add(
        "--pool",
        default="auto",
        metavar="SIZE",
        help='memory to read from, such as "8GiB" or "25%%" of what is available; should be far larger than the caches '
        '(default "auto": 25%%, but 4 GiB where that is less and half of the memory is more; at most 16 GiB, or 4 GiB '
        "with --quick)",
    )
    add("--seconds", type=_seconds, metavar="S", help="of each measurement (default: 0.5; 0.2 if --quick)")
    add("--out", type=Path, default=Path("bench-worker.json"), metavar="FILE", help="JSON file (default: %(default)s)")
    return parser


def _number(least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number from {least} to {most}")
        return int(text)

    return convert


def _numbers(least: int, most: int) -> Callable[[str], tuple[int, ...]]:
    one = _number(least, most)
    return lambda text: tuple(sorted({one(part) for part in text.split(",")}))


def _names(what: str, known: Sequence[str] | None = None) -> Callable[[str], tuple[str, ...]]:
    def convert(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        for name in names:
            if not name or (known is not None and name not in known):
                legal = f"must be of {', '.join(known)}" if known else "is no name"
                raise argparse.ArgumentTypeError(f"{what} {name!r} {legal}")
        return names

    return convert


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 60:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0 and up to 60")
    return seconds
