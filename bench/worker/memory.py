"""Available memory, cache sizes, and the default size of the benchmark's pool."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

GIB = 1 << 30
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_CGROUP = Path("/sys/fs/cgroup")
_LEAST_POOL = GIB // 4


def available_memory() -> int:
    """Return the bytes that this process can allocate: the host's available memory, limited by the container."""
    available: int = psutil.virtual_memory().available
    try:
        granted = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return available
    return max(0, min(available, granted - used))


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
