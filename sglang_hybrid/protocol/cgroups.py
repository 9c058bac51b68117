"""This process's control groups (version 1 or 2), which containers and systemd use for limits, and their CPU quota."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
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


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the smallest CPU quota, in cores, of this process's cgroup and those around it. None means no quota."""
    quotas = [_quota(folder, version) for folder, version in groups(root, "cpu")]
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
