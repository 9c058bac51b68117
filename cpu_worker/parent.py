"""Watch over the process that this worker belongs to: when that process ends, the worker ends too."""

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
    """Watcher of process ``pid``, which need not be the real parent: there may be a shell between both."""

    # The kernel sends this signal to the worker when its real parent ends, or only the parent's thread that started the
    # worker; so the signal must be harmless. The signal continues a stopped worker, which then sees that its parent is
    # gone, and cleans up.
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
            pass  # a kernel or sandbox without pidfds: the event loop must call is_gone now and then

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
    """Set the name that ps and top show for this process, cut to 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
