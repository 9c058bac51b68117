"""One line that shows the benchmark's progress. No thread updates it in between: that would disturb measurements."""

from __future__ import annotations

import sys
import time


def counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


class Progress:
    """Progress on stderr: one line that is rewritten on a terminal, or else a new line every few seconds."""

    _PAUSE_S = 5.0

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._printed = -self._PAUSE_S
        self._start = time.monotonic()
        self._steps = self._done = 0

    def begin(self, steps: int) -> None:
        """Set the number of steps. From now on, lines show an estimate of the time left."""
        self._start, self._steps = time.monotonic(), steps

    def step(self, text: str) -> None:
        """Begin the next step and show ``text``, a description of it."""
        self._done += 1
        spent = time.monotonic() - self._start
        left = spent / (self._done - 1) * (self._steps - self._done + 1) if self._done > 1 else None
        self.say(f"{self._done}/{self._steps} {text}" + (f", {left:.0f} s left" if left is not None else ""))

    def say(self, text: str) -> None:
        now = time.monotonic()
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif now - self._printed >= self._PAUSE_S:
            self._printed = now
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
