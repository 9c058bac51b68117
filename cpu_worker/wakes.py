"""Descriptor that ends the event loop's wait when a signal arrives, or when another thread asks for it."""

from __future__ import annotations

import contextlib
import signal
import socket
from types import FrameType, TracebackType

from cpu_worker.parent import Parent

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Wakes:
    """From construction to ``close``, signals only write their number to ``fd``. For the main thread only."""

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
        """Make ``fd`` readable. May be called by any thread."""
        with contextlib.suppress(BlockingIOError):  # the socket is full, so ``fd`` is readable anyway
            self._write.send(b"\0")

    def read(self) -> str | None:
        """Drain ``fd``. Return the name of a signal that asks to end, if there was one. Any thread may call this."""
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
    """Ignore a signal. SIG_IGN would not do: only handled signals are written to the descriptor."""
