"""Files in /dev/shm that killed processes leave behind: semaphores of Python's multiprocessing, SGLang's load file.

Who made such a file cannot be read from its name. Processes that use one have it mapped, so a launcher notes what its
own processes map while they live, and removes these files when they are gone and nobody else maps them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_DIRECTORY = "/dev/shm/"
# address, permissions, offset, device, inode, path
_MAPPING = re.compile(rf"^\S+ \S+ \S+ \S+ (\d+) +({_DIRECTORY}.*)$", re.MULTILINE)
_DELETED = " (deleted)"


@dataclass(frozen=True)
class SharedFile:
    path: str
    inode: int


def files_mapped_by(pids: Iterable[int]) -> set[SharedFile]:
    """Named files in /dev/shm. Processes that ended or belong to another user have none."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for inode, path in _MAPPING.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")):
                if not path.endswith(_DELETED):
                    found.add(SharedFile(path, int(inode)))
    return found


def remove(files: set[SharedFile]) -> None:
    """Remove those that still exist and that no living process maps."""
    ours = {file for file in files if _exists(file)}
    if not ours:
        return
    everybody = (int(name) for name in os.listdir("/proc") if name.isdigit())
    for file in ours - files_mapped_by(everybody):
        with contextlib.suppress(OSError):
            os.unlink(file.path)


def _exists(file: SharedFile) -> bool:
    try:
        status = os.lstat(file.path)
    except OSError:
        return False
    return status.st_ino == file.inode and status.st_uid == os.geteuid()
