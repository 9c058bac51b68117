"""What plain reading gets from the pool: the ceiling of block attention."""

from __future__ import annotations

import itertools
import statistics

from bench.worker.memory import GIB
from bench.worker.pool import Pool
from bench.worker.running import core_array
from sglang_hybrid.ops.cpu import library
from sglang_hybrid.protocol.cores import Placement

_REPEATS = 3
_MOST_BYTES = 4 * GIB  # of one repeat
_MOST_BYTES_PER_THREAD = GIB // 2  # read in less than a tenth of a second


class ReadBandwidth:
    """Reads through the whole pool before it reads any part twice, as the measurements of attention do: the last-level
    cache of a server holds a good part of what is read again soon."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._position = 0

    def measure(self, placement: Placement) -> float:
        """GB/s of the threads of ``placement`` together; median of several."""
        size = min(self._pool.size, _MOST_BYTES, placement.threads * _MOST_BYTES_PER_THREAD)
        return statistics.median(self._read(size, placement) for _ in itertools.repeat(None, _REPEATS)) / 1e9

    def _read(self, size: int, placement: Placement) -> float:
        if self._position + size > self._pool.size:
            self._position = 0
        start = self._pool.address + self._position
        self._position += size
        rate: float = library().sh_read_bandwidth(start, size, placement.threads, core_array(placement.cores))
        return rate
