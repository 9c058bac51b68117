"""Files in /dev/shm that killed processes leave behind: semaphores of Python's multiprocessing, SGLang's load file.

Who made such a file cannot be read from its name. Processes that use one have it mapped, so a launcher notes what its
own processes map while they live, and removes these files when they are gone and nobody else maps them.

Files are known by their inodes: a semaphore's maker maps it under another name, which is deleted by then.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

_DIRECTORY = "/dev/shm"
# address, permissions, offset, device, inode, path
_MAPPING = re.compile(rf"^\S+ \S+ \S+ \S+ (\d+) +{_DIRECTORY}/", re.MULTILINE)


def files_mapped_by(pids: Iterable[int]) -> set[int]:
    """Inodes of files in /dev/shm. Processes that ended or belong to another user have none."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.update(map(int, _MAPPING.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace"))))
    return found


def names_of(inodes: set[int]) -> list[str]:
    """Paths of those of these files that have a name now and belong to this user."""
    names = []
    with contextlib.suppress(OSError), os.scandir(_DIRECTORY) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.inode() in inodes and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    names.append(entry.path)
    return names


def remove(inodes: set[int]) -> None:
    """Remove those that still have a name and that no living process maps."""
    if not names_of(inodes):
        return
    everybody = (int(name) for name in os.listdir("/proc") if name.isdigit())
    for name in names_of(inodes - files_mapped_by(everybody)):
        with contextlib.suppress(OSError):
            os.unlink(name)
