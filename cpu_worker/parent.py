"""The process that this worker ends with."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


class Parent:
    """Watches process ``pid``, which need not be our real parent: someone may have put a shell between us."""

    # Sent to us by the kernel when our real parent ends (or only the thread of it that started us, hence a harmless
    # one): it wakes a worker that somebody stopped, so that it can see that its parent is gone, and clean up.
    SIGNAL = signal.SIGCONT

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd: int | None = None  # readable when the process has ended
        self._missing = False
        self._real = os.getppid() == pid
        _libc.prctl(_PR_SET_PDEATHSIG, int(self.SIGNAL), 0, 0, 0)
        try:
            self.fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._missing = True
        except OSError:
            pass  # a kernel or sandbox without pidfds: whoever waits for us must look now and then

    def is_gone(self) -> bool:
        if self._missing:
            return True
        if self.fd is not None:
            ended = select.poll()
            ended.register(self.fd, select.POLLIN)
            return bool(ended.poll(0))
        if self._real:
            return os.getppid() != self.pid
        with contextlib.suppress(PermissionError):
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return True
        return False

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def set_process_name(name: str) -> None:
    """What ps and top show; at most 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
