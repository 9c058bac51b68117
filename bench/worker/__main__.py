"""``python -m bench.worker``: run all measurements, print the table and write the JSON file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.worker.arguments import Settings, kernel_dtype, parse
from bench.worker.memory import GIB, last_level_cache
from bench.worker.progress import Progress, counted
from sglang_hybrid import __version__, container
from sglang_hybrid.ops.cpu import NativeError, library
from sglang_hybrid.protocol.cores import Placement, Topology, place, read_topology

if TYPE_CHECKING:  # these need torch, which takes seconds to import; errors in arguments are reported without it
    from bench.worker.pool import Pool, Posts
    from bench.worker.results import Results

_POOL_PER_CACHE = 4  # pool size over cache size; a smaller pool is partly read from the cache
_PROVIDER_BLOCKS = 8  # blocks per task at which other providers are compared, if this number is measured
_BUSY_LOAD = 0.5  # load average above which a note warns


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with the command line ``argv`` and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    topology = read_topology()
    progress = Progress()
    try:
        settings = parse(arguments, topology)
        run(settings, topology, progress, arguments)
    except KeyboardInterrupt:
        progress.end()
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _failed(progress, f"the pool is made with torch, so this needs torch ({error}): install it")
    except (NativeError, OSError, RuntimeError) as error:  # raised by measurements and allocations
        return _failed(progress, str(error))
    return 0


def _failed(progress: Progress, reason: str) -> int:
    progress.end()
    print(f"python -m bench.worker: {reason}", file=sys.stderr)
    return 1


def run(settings: Settings, topology: Topology, progress: Progress, argv: Sequence[str]) -> None:
    from bench.worker import result_file
    from bench.worker.pool import Pool
    from bench.worker.results import Results
    from bench.worker.table import print_results

    host = _host(topology)
    results = Results(notes=_notes(settings))
    progress.say(f"taking and filling {settings.pool_bytes / GIB:.2f} GiB of memory")
    pool = Pool(settings)
    try:
        host["huge_page_share"] = share = pool.huge_page_share()
        if share is not None and share < 0.5:
            results.notes.append(_small_pages(host["shmem_huge_pages"]))
        _Run(settings, topology, progress, pool, results).everything()
    finally:
        pool.close()
    progress.end()
    print_results(results)
    result_file.write(settings.out, results, settings, host, argv)
    print(f"written to {settings.out}")


class _Run:
    def __init__(
        self, settings: Settings, topology: Topology, progress: Progress, pool: Pool, results: Results
    ) -> None:
        self._settings, self._topology, self._progress = settings, topology, progress
        from bench.worker.bandwidth import ReadBandwidth

        self._pool, self._results = pool, results
        self._reading = ReadBandwidth(pool)
        self._placements = [place(topology, "auto", threads, 0) for threads in settings.threads]
        # a variant without a kernel for a dtype would measure another variant's kernel under a wrong name
        self._kernels = {
            dtype: list(dict.fromkeys(_kernel_of(dtype, settings.head_dim, name) for name in settings.variants))
            for dtype in settings.dtypes
        }
        compared = _PROVIDER_BLOCKS if _PROVIDER_BLOCKS in settings.blocks else settings.blocks[-1]
        self._provider_blocks: int | None = compared

    def everything(self) -> None:
        kernels = sum(map(len, self._kernels.values()))
        each = len(self._settings.blocks) * kernels + len(self._settings.dtypes) * len(self._settings.providers) + 2
        self._progress.begin(each * len(self._placements) + 1)
        self._read(self._results.read_before)
        self._round_trip()
        for dtype in self._settings.dtypes:
            for blocks in self._settings.blocks:
                self._attend(dtype, blocks)
        self._read(self._results.read_after)

    def _read(self, measured: dict[int, float]) -> None:
        for placement in self._placements:
            self._progress.step(f"reading, {counted(placement.threads, 'thread')}")
            measured[placement.threads] = self._reading.measure(placement)

    def _round_trip(self) -> None:
        from bench.worker.round_trip import measure_round_trip

        self._progress.step("round trip")
        as_served = place(self._topology, "auto", 0, 0)
        self._results.round_trip = measure_round_trip(
            self._pool, self._settings, self._settings.dtypes[0], as_served, self._topology
        )

    def _attend(self, dtype: str, blocks: int) -> None:
        from bench.worker.attention import measure_attention
        from bench.worker.pool import posts_of
        from bench.worker.results import Point

        posts = posts_of(self._pool, self._settings, dtype, blocks)
        for placement in self._placements:
            for variant in self._kernels[dtype]:
                self._progress.step(
                    f"{dtype}, {variant}, {counted(placement.threads, 'thread')}, {counted(blocks, 'block')}"
                )
                rate = measure_attention(
                    self._pool, self._reading, posts, dtype, variant, placement, self._topology, self._settings.seconds
                )
                shape = (posts.rows, posts.post_bytes)
                self._results.points.append(Point(dtype, variant, placement.threads, blocks, *shape, rate))
            if blocks == self._provider_blocks:
                for provider in self._settings.providers:
                    self._attend_with(provider, dtype, posts, placement)

    def _attend_with(self, provider: str, dtype: str, posts: Posts, placement: Placement) -> None:
        from bench.worker.results import Point
        from bench.worker.torch_provider import measure_provider

        self._progress.step(
            f"{dtype}, {provider}, {counted(placement.threads, 'thread')}, {counted(posts.blocks, 'block')}"
        )
        try:
            rate = measure_provider(provider, self._pool, posts, dtype, placement, self._settings.seconds)
        except (RuntimeError, AttributeError) as error:  # this torch lacks an operation, for this dtype or at all
            note = f"provider {provider} was not measured for {dtype}: {error}"
            if note not in self._results.notes:
                self._results.notes.append(note)
            return
        shape = (posts.rows, posts.post_bytes)
        self._results.points.append(Point(dtype, provider, placement.threads, posts.blocks, *shape, rate))


def _kernel_of(dtype: str, head_dim: int, variant: str) -> str:
    name: bytes = library().sh_variant_name(kernel_dtype(dtype), head_dim, variant.encode())
    return name.decode()


def _host(topology: Topology) -> dict[str, Any]:
    return {
        "sglang_hybrid": __version__,
        "physical_cores": len(topology.cores),
        "cpus": len(topology.cpus),
        "numa_nodes": len({core.node for core in topology.cores}),
        "cpu_quota": topology.quota,
        "last_level_cache_bytes": last_level_cache(),
        "available_memory_bytes": container.memory().available,
        "load_before": round(os.getloadavg()[0], 2),
        "shmem_huge_pages": _shmem_huge_pages(),
    }


def _shmem_huge_pages() -> str | None:
    """Return the kernel's setting of huge pages in shared memory; None if unknown.

    It is the word in brackets, as in "always within_size advise [never] deny force".
    """
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def _small_pages(setting: str | None) -> str:
    return (
        "the pool is in small pages: random blocks wait for the page table too. A server's pool gets huge ones where "
        f"/sys/kernel/mm/transparent_hugepage/shmem_enabled is advise or always; it is {setting or 'not there'}"
    )


def _notes(settings: Settings) -> list[str]:
    notes = []
    cache = last_level_cache()
    if cache and settings.pool_bytes < _POOL_PER_CACHE * cache:
        notes.append(
            f"the pool of {settings.pool_bytes >> 20} MiB is less than {_POOL_PER_CACHE} times the last-level cache of "
            f"{cache >> 20} MiB: part of it is read from there"
        )
    if (load := os.getloadavg()[0]) > _BUSY_LOAD:
        notes.append(f"other processes were running (load {load:.1f} before the start): expect too small numbers")
    return notes


if __name__ == "__main__":
    sys.exit(main())
