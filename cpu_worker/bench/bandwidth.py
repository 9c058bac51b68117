"""What plain reading gets from the pool: the ceiling of block attention."""

from __future__ import annotations

from cpu_worker.bench.memory import GIB
from cpu_worker.bench.pool import Pool
from cpu_worker.bench.running import core_array
from cpu_worker.cores import Placement
from sglang_hybrid.native import library

_REPEATS = 3
_MOST_BYTES = 4 * GIB  # more than a cache holds, and one thread is through with it in less than a second


def measure_bandwidth(pool: Pool, placement: Placement) -> float:
    """GB/s of the threads of ``placement`` together, each reading its own part front to back; best of several."""
    size = min(pool.size, _MOST_BYTES)
    rate: float = library().sh_read_bandwidth(
        pool.address, size, placement.threads, core_array(placement.cores), _REPEATS
    )
    return rate / 1e9
