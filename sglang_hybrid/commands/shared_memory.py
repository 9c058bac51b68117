"""Files in /dev/shm that killed processes leave behind: semaphores of Python's multiprocessing, SGLang's load file.

The name of such a file does not show which process made it. Processes that use a file map it. So a launcher records
which files its own processes map while they run, and removes these files when its processes have ended and no other
process maps them.

Files are identified by inode, because the process that makes a semaphore maps it under another name, which it deletes.
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
    """Return the inodes of files in /dev/shm that the processes map. Ended processes and other users' are skipped."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.update(map(int, _MAPPING.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace"))))
    return found


def names_of(inodes: set[int]) -> list[str]:
    """Return the paths of the files with these inodes that have a name now and belong to this user."""
    names = []
    with contextlib.suppress(OSError), os.scandir(_DIRECTORY) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.inode() in inodes and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    names.append(entry.path)
    return names


def remove(inodes: set[int]) -> None:
    """Remove the files with these inodes that belong to this user and that no running process maps."""
    if not names_of(inodes):
        return
    everybody = (int(name) for name in os.listdir("/proc") if name.isdigit())
    for name in names_of(inodes - files_mapped_by(everybody)):
        with contextlib.suppress(OSError):
            os.unlink(name)
