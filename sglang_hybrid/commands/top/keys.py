"""Keys that a person presses while a view is on the screen."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from typing import Any


class Keys:
    """Standard input, read key by key without echo. Without a terminal there are no keys."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] = []

    def __enter__(self) -> Keys:
        if self._file is not None:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)  # Ctrl-C stays an interrupt
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    def asked_to_quit(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for a key. Return True if the key was q."""
        if self._file is None:
            time.sleep(seconds)
            return False
        ready, _, _ = select.select([self._file], [], [], seconds)
        return bool(ready) and os.read(self._file, 64).lower().startswith(b"q")
