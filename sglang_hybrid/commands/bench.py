"""``sglang-hybrid bench NAME``: run one of SGLang's benchmarks with the plugin, or the CPU worker's benchmark."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from sglang_hybrid.commands import checkout

# by benchmark: the module that is run as a process's main module, and what the benchmark measures
_MODULES = {
    "one_batch": ("sglang_hybrid.bench_one_batch", "time of prefill and decode steps of one batch, without a server"),
    "offline_throughput": ("sglang_hybrid.bench_offline_throughput", "tokens a second of many requests, in process"),
    "one_batch_server": ("sglang_hybrid.bench_one_batch_server", "one batch, sent to a server that it starts"),
    # a client of a running server: it needs no plugin
    "serving": ("sglang.benchmark.serving", "requests over time, sent to a server that runs already"),
}
_WORKER = "GB/s of block attention on this host's CPU, beside its read bandwidth, in a checkout"


def main(arguments: Sequence[str]) -> int:
    """Replace this process by the named benchmark (exec). Return an exit status only for --help and for errors."""
    name, rest = (arguments[0] if arguments else ""), list(arguments[1:])
    if name in _MODULES:
        # The benchmark must be the main module of its process: processes that it spawns import the main module again.
        os.execv(sys.executable, [sys.executable, "-m", _MODULES[name][0], *rest])
    if name == "worker":
        return checkout.run("bench.worker", "sglang-hybrid bench worker", rest)
    if name in ("-h", "--help"):
        print(_help())
        return 0
    complaint = f"there is no benchmark {name!r}" if name else "name a benchmark"
    print(f"{_help()}\nsglang-hybrid bench: {complaint}", file=sys.stderr)
    return 2


def run_with_defaults(benchmark: Callable[[], None]) -> None:
    """Run one of SGLang's benchmarks, which reads this process's arguments, with the backend and model of ``serve``."""
    from sglang_hybrid.commands.arguments import Refused
    from sglang_hybrid.env import ConfigError
    from sglang_hybrid.integration.refusals import Refusal
    from sglang_hybrid.memory.capacity import CapacityError

    try:
        sys.argv[1:] = with_defaults(sys.argv[1:])
        benchmark()
    except (ConfigError, Refusal, CapacityError, Refused) as error:
        sys.exit(f"sglang-hybrid: {error}")


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """Return a benchmark's arguments with our backend as default and the model resolved as in ``serve``."""
    from sglang_hybrid.commands.arguments import given
    from sglang_hybrid.commands.defaults import with_model
    from sglang_hybrid.integration import BACKEND_NAME

    completed = list(arguments)
    if not given(completed, "--attention-backend"):
        completed += ["--attention-backend", BACKEND_NAME]
    return with_model(completed)


def _help() -> str:
    names = "\n".join(f"  {name:20}{summary}" for name, (_, summary) in {**_MODULES, "worker": ("", _WORKER)}.items())
    return (
        "usage: sglang-hybrid bench NAME ...\n\n"
        f"benchmarks (NAME --help lists the flags of each):\n{names}\n\n"
        "SGLang's benchmarks run the default model with --attention-backend hybrid unless flags say otherwise.\n\n"
        "examples:\n"
        "  sglang-hybrid bench one_batch --batch-size 2 --input-len 512 --output-len 16\n"
    )
