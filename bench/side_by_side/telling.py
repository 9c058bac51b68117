"""Prints a benchmark's progress with the time, and reads the end of a log when something failed."""

from __future__ import annotations

import re
import time
from pathlib import Path

_BEGUN = time.monotonic()
_LINES, _WIDTH = 25, 400
_DULL = re.compile(r'ServerArgs\(|HTTP/1\.1" 200 OK')


def say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGUN:6.1f} s] {text}", flush=True)


def log_tail(log: Path, lines: int = _LINES) -> list[str]:
    """Return the last lines of ``log``, without requests that went well and SGLang's very long line of settings."""
    if not log.is_file():
        return []
    kept = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and not _DULL.search(line)]
    return [line[:_WIDTH] for line in kept[-lines:]]
