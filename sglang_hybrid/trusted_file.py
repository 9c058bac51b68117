"""Check before a compiled file from a cache is loaded as code: only this user or root may be able to write it.

Files that are installed beside our Python code need no check: whoever can change them can change this module too.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


class UntrustedFile(RuntimeError):
    """A compiled file belongs to another user or is writable by others. The message says which, and what to do."""


def check(path: Path) -> None:
    """Raise UntrustedFile if ``path`` or its directory has another owner than us or root, or is writable by others.

    The directory counts because whoever may write it can replace the file. Raise OSError if one of them is missing.
    """
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
