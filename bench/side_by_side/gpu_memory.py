"""GPU memory as the driver counts it, by nvidia-smi."""

from __future__ import annotations

import contextlib
import shutil
import subprocess


def used_bytes() -> int | None:
    """Of the first GPU, by all processes: a container does not see whose they are. None without a GPU."""
    return _asked("memory.used")


def total_bytes() -> int | None:
    """Of the first GPU. None without one."""
    return _asked("memory.total")


class ServerMemory:
    """What a server takes: made before the server starts, and asked while it runs."""

    def __init__(self) -> None:
        self._before = used_bytes()

    def taken(self) -> int | None:
        """Bytes more than before: weights, graphs, context and KV cache. None without a GPU."""
        now = used_bytes()
        return None if self._before is None or now is None else now - self._before


def _asked(field: str) -> int | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        words = asked.stdout.split()
        return int(words[0]) << 20 if words and words[0].isdigit() else None
    return None
