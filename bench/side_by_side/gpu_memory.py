"""GPU memory in use, as the driver counts it."""

from __future__ import annotations

import shutil
import subprocess


def used_bytes() -> int | None:
    """Of the first GPU, by all processes: a container does not see whose they are. None without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    words = asked.stdout.split()
    return int(words[0]) << 20 if asked.returncode == 0 and words and words[0].isdigit() else None
