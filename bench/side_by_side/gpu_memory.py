"""Reads GPU memory, as the driver counts it, from nvidia-smi."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from typing import ClassVar


def used_bytes() -> int | None:
    """Return the bytes that all processes use on the first GPU; None without a GPU.

    A container cannot tell the processes apart.
    """
    return _asked("memory.used")


def total_bytes() -> int | None:
    """Return all bytes of the first GPU; None without a GPU."""
    return _asked("memory.total")


class ServerMemory:
    """GPU memory that a server takes. Create the object before the server starts; read it while the server runs.

    The driver frees the memory of an earlier server some time after its end. So creation waits, for at most
    ``seconds``, until the memory in use is back to the least that was ever seen, or nearly.
    """

    _NEARLY = 256 << 20
    _least: ClassVar[int | None] = None  # that any object has seen

    def __init__(self, seconds: float = 30.0) -> None:
        end, used = time.monotonic() + seconds, used_bytes()
        least = ServerMemory._least
        while used is not None and least is not None and used > least + self._NEARLY and time.monotonic() < end:
            time.sleep(0.5)
            used = used_bytes()
        ServerMemory._least = min((one for one in (least, used) if one is not None), default=None)
        self._before = used

    def taken(self) -> int | None:
        """Return the bytes in use beyond those at creation: weights, graphs, context, KV cache. None without a GPU."""
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
