"""Plain read bandwidth of the pool: the upper bound for block attention."""

from __future__ import annotations

import itertools
import statistics

from bench.worker.memory import GIB
from bench.worker.pool import Pool
from bench.worker.running import core_array
from sglang_hybrid.ops.cpu import library
from sglang_hybrid.protocol.cores import Placement

_REPEATS = 3
_MOST_BYTES = 4 * GIB  # read by one repeat
_MOST_BYTES_PER_THREAD = GIB // 2  # read in less than a tenth of a second


class ReadBandwidth:
    """Measures plain reads. Consecutive measurements read through the whole pool before they read any part again.

    The measurements of attention do so too: a server's last-level cache holds a good part of what is read again soon.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._position = 0

    def measure(self, placement: Placement) -> float:
        """Return the GB/s that the threads of ``placement`` read together: the median of several repeats."""
        size = min(self._pool.size, _MOST_BYTES, placement.threads * _MOST_BYTES_PER_THREAD)
        return statistics.median(self._read(size, placement) for _ in itertools.repeat(None, _REPEATS)) / 1e9

    def _read(self, size: int, placement: Placement) -> float:
        if self._position + size > self._pool.size:
            self._position = 0
        start = self._pool.address + self._position
        self._position += size
        rate: float = library().sh_read_bandwidth(start, size, placement.threads, core_array(placement.cores))
        return rate
