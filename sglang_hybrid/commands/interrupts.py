"""Signals that ask a launcher to end: SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import os
import signal
from types import FrameType

_ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked this process to end before ``Interrupts.watch`` was called."""


class Interrupts:
    """Catches the signals from construction on. Main thread only.

    Before ``watch`` is called, a signal raises Interrupted, which ends whatever is computed. Afterwards a signal only
    makes the object readable (``fileno``), so that nothing is left half done. Only the first signal has an effect.
    """

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._watched = False
        self.came = False
        for number in _ASKED:
            # SIGHUP stays ignored under nohup. SIGINT is caught even if it was ignored: a server that a script started
            # in the background ends with the script's Ctrl-C, as other servers do.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._take)

    def watch(self) -> None:
        self._watched = True

    def fileno(self) -> int:
        return self._reading

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self.came:
            return
        self.came = True
        if not self._watched:
            self._watched = True
            raise Interrupted
        os.write(self._writing, b".")
