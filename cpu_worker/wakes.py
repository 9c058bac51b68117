"""What ends the event loop's wait from outside: signals, and threads that have something to say."""

from __future__ import annotations

import contextlib
import signal
import socket
from types import FrameType, TracebackType

from cpu_worker.parent import Parent

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Wakes:
    """From construction to ``close``, signals only make ``fd`` readable, with their number. Main thread only."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        for end in (self._read, self._write):
            end.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _nothing) for number in (*_STOP_SIGNALS, Parent.SIGNAL)}

    @property
    def fd(self) -> int:
        return self._read.fileno()

    def wake(self) -> None:
        """For any thread."""
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            self._write.send(b"\0")

    def read(self) -> str | None:
        """Take what came; the name of a signal that asks us to end, if there was one. For any thread."""
        with contextlib.suppress(BlockingIOError):
            for number in self._read.recv(4096):
                if number in _STOP_SIGNALS:
                    return signal.Signals(number).name
        return None

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._read.close()
        self._write.close()

    def __enter__(self) -> Wakes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Not SIG_IGN: only a handled signal is written to the descriptor."""
