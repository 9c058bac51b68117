"""Writes the parts of a report as a .tar.gz file without the names of its maker."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid.commands.report_problem.collect import Part

FOLDER = "sglang-hybrid-report"


def default_name() -> Path:
    return Path(time.strftime(f"{FOLDER}-%Y%m%d-%H%M%S.tar.gz"))


def write(path: Path, parts: Sequence[Part]) -> None:
    """Write a new archive that only its owner can read. Raise OSError if the file exists or cannot be written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for part in parts:
            data = part.text.encode()
            entry = tarfile.TarInfo(f"{FOLDER}/{part.name}")  # owned by user 0 without a name
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
