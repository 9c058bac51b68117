"""Memory that a container's cgroup limits (version 1 or 2) leave to this process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from sglang_hybrid.protocol.cgroups import groups

_UNLIMITED = 1 << 62  # cgroup version 1 expresses "no limit" by a number of about this size


@dataclass(frozen=True)
class _Files:
    """File names of one cgroup version, and the key in memory.stat of cache that usage counts but can be reclaimed."""

    limit: str
    usage: str
    cache: str


_FILES = {
    1: _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Files("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True)
class Memory:
    total: int  # bytes
    available: int  # bytes that are free now


def memory(root: Path = Path("/")) -> Memory:
    """Return the machine's memory, lowered to the limits of this process's cgroup and of the cgroups around it."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for folder, version in groups(root, "memory"):
        files = _FILES[version]
        limit = _number(folder / files.limit)
        if limit is None or limit >= _UNLIMITED:
            continue
        used = _number(folder / files.usage) or 0
        total = min(total, limit)
        available = min(available, max(0, limit - used + _cached(folder, files)))
    return Memory(total, available)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # the file does not exist, or holds "max"
        return None


def _cached(folder: Path, files: _Files) -> int:
    try:
        found = re.search(rf"^{files.cache} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
