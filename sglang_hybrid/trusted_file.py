"""Which compiled files in a cache are loaded as code: those that nobody but this user could have put there.

What is installed beside our Python code needs no such look: whoever could change it could change this file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


class UntrustedFile(RuntimeError):
    """The message says whose it is or who may write it, and what to do."""


def check(path: Path) -> None:
    """Raises UntrustedFile or OSError. The directory counts too: who may write it can put another file there."""
    for place in (path.parent, path):
        found = place.stat()
        if found.st_uid not in (os.geteuid(), 0):
            raise UntrustedFile(
                f"{place} belongs to user {found.st_uid}, not to {os.geteuid()}: remove it, or choose another place "
                "with SGLANG_HYBRID_CACHE"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UntrustedFile(
                f"{place} can be written by others (mode {stat.S_IMODE(found.st_mode):o}): if you know what is in it, "
                f"chmod go-w {place}; otherwise remove it"
            )
