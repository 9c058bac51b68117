"""Logging to stderr, one line per message after the process's name, with a limit on warnings about clients."""

from __future__ import annotations

import logging
import os
import sys
import time

LEVELS = ("debug", "info", "warning", "error")


def set_up(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"sglang-hybrid worker[{os.getpid()}]: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class LimitedLog:
    """Logger that writes at most one warning in ``interval_s``. The next warning says how many were left out."""

    def __init__(self, log: logging.Logger, interval_s: float = 1.0) -> None:
        self._log, self._interval_s = log, interval_s
        self._last = -float("inf")
        self._left_out = 0

    def warning(self, message: str) -> None:
        now = time.monotonic()
        if now - self._last < self._interval_s:
            self._left_out += 1
            return
        more = f" (and {self._left_out} more since the last message)" if self._left_out else ""
        # the message may contain text from a client, so it is escaped to one line and cut
        self._log.warning("%s%s", message[:500].encode("unicode_escape").decode("ascii"), more)
        self._last, self._left_out = now, 0
