"""Cache sizes, and the default size of the benchmark's pool."""

from __future__ import annotations

import re
from pathlib import Path

GIB = 1 << 30
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_LEAST_POOL = GIB // 4


def default_pool(available: int, quick: bool) -> int:
    """Return the default size of the pool in bytes: far larger than any cache if memory allows.

    0: too little memory is available for a useful measurement.
    """
    size = min((4 if quick else 16) * GIB, max(available // 4, min(4 * GIB, available // 2)))
    return size if size >= _LEAST_POOL else 0


def last_level_cache() -> int | None:
    """Return the bytes of the largest cache of CPU 0; None if the system does not report caches."""
    sizes = [re.fullmatch(r"(\d+)([KM])", file.read_text().strip()) for file in _CACHE.glob("index*/size")]
    return max((int(size[1]) << (10 if size[2] == "K" else 20) for size in sizes if size), default=None)
