"""Checks the free disk space before anything is written."""

import shutil
from pathlib import Path

from sglang_hybrid.commands.model.errors import DefaultModelError


def check_disk_space(directory: Path, needed: int, what: str) -> None:
    """Raise DefaultModelError if ``needed`` bytes do not fit where ``directory`` is."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DefaultModelError(
            f"Not enough disk space for {what} in {directory.parent}: {needed / 1e6:.0f} MB needed, "
            f"{free / 1e6:.0f} MB free. Make room, or choose another place with --cache-dir or SGLANG_HYBRID_CACHE."
        )
