"""A small process that outlives a killed launcher and ends the processes that the launcher started.

The launcher forks the guard before it starts any process, and writes the id of every process to a pipe. End of file on
the pipe tells the guard that the launcher is gone. After an orderly end no process is left to end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable

import psutil

_PR_SET_NAME = 15


class Guard:
    """The launcher's handle of the guard. Create it before any thread starts: the guard is a fork of this process."""

    def __init__(self, end: Callable[[list[psutil.Process]], None]) -> None:
        """``end``: called in the guard with the watched processes, once the launcher is gone."""
        reading, self._pipe = os.pipe2(os.O_CLOEXEC)
        launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._pipe)
                _watch(reading, launcher, end)
                status = 0
            finally:
                os._exit(status)
        os.close(reading)

    def watches(self, pid: int) -> None:
        with contextlib.suppress(OSError):  # the guard was killed
            os.write(self._pipe, f"{pid}\n".encode())

    def close(self) -> None:
        """Close the pipe and wait until the guard has ended. Call this after all watched processes have ended."""
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _watch(reading: int, launcher: int, end: Callable[[list[psutil.Process]], None]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"hybrid-guard", 0, 0, 0)
    # The guard stays in the launcher's process group, which the launcher itself may leave (see foreground.py), and
    # passes signals to that group on to the launcher.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda asked, _frame: _pass_on(launcher, asked))
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    watched: list[psutil.Process] = []
    rest = b""
    while data := os.read(reading, 4096):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(psutil.NoSuchProcess):
                watched.append(psutil.Process(int(line)))
    end(watched)


def _pass_on(launcher: int, number: int) -> None:
    if os.getppid() == launcher:
        os.kill(launcher, number)
