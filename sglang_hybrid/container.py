"""Memory and CPU time that a container's cgroup limits (version 1 or 2) leave to this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

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
    for folder, version in _groups(root, "memory"):
        files = _FILES[version]
        limit = _number(folder / files.limit)
        if limit is None or limit >= _UNLIMITED:
            continue
        used = _number(folder / files.usage) or 0
        total = min(total, limit)
        available = min(available, max(0, limit - used + _cached(folder, files)))
    return Memory(total, available)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the smallest CPU quota, in cores, of this process's cgroup and those around it. None means no quota."""
    quotas = [_quota(folder, version) for folder, version in _groups(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path, version: int) -> float | None:
    try:
        if version == 2:
            granted, period = (folder / "cpu.max").read_text().split()
        else:
            granted, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(granted) / int(period) if int(granted) > 0 else None  # version 1 expresses "no limit" by -1
    except (OSError, ValueError, ZeroDivisionError):  # the file does not exist, or holds "max"
        return None


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield (folder, cgroup version) of this process's cgroup for ``controller``, then of each cgroup around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            top, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        # In a container the path may be the host's and not exist here: then the top is the container's own cgroup.
        own = top / path.lstrip("/")
        folder = own if own.is_dir() else top
        while True:
            yield folder, version
            if folder == top:
                break
            folder = folder.parent


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
