"""A worker process that the server starts, with a temporary directory of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from sglang_hybrid.protocol.directory import WorkerDirectory

PREFIX = "sglang-hybrid-"
_STOP_SECONDS = 2.0


class WorkerProcess:
    """A worker process, started at construction. Call ``end`` even if the process has died by itself."""

    def __init__(self) -> None:
        """Start the process. Raise OSError if the directory cannot be created or the process cannot be started."""
        # in the directory for temporary files, since a socket's path must be short; mkdtemp sets mode 0700
        self.directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        try:
            self._process = subprocess.Popen(
                # -P: import nothing from the server's current directory
                [sys.executable, "-P", "-m", "cpu_worker", "--dir", str(self.directory), "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must reach only the server, which ends its worker
            )
        except BaseException:
            _remove(self.directory)
            raise
        self.pidfd = -1
        try:
            self.pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, patience_s: float = _STOP_SECONDS) -> str:
        """End the process if it still runs, wait for it and remove its directory. Return how it ended, in words.

        The process is killed if it still runs ``patience_s`` after SIGTERM.
        """
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
            self._process.kill()
        status = self._process.wait()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        _remove(self.directory)
        return f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"

    def kill(self) -> None:
        """Kill a process that does not answer. ``end`` must still be called."""
        self._process.kill()


def _remove(directory: Path) -> None:
    """Remove a worker's directory, even if no file descriptor is left, which rmtree needs."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        place = WorkerDirectory(directory)
        for socket in (place.control, place.regions):
            socket.unlink(missing_ok=True)
        directory.rmdir()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time signals, Python names only the first and the last
        return f"signal {number}"


def remove_leftovers() -> None:
    """Remove directories of servers that were killed together with their workers and could not remove them."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}[0-9]*-*"):
        owner = directory.name.removeprefix(PREFIX).split("-")[0]
        with contextlib.suppress(OSError, OverflowError):  # a number that no process can have
            if owner.isdigit() and directory.stat().st_uid == os.getuid() and not psutil.pid_exists(int(owner)):
                _remove_unlocked(directory)


def _remove_unlocked(directory: Path) -> None:
    """Remove a directory. Raise OSError if a living worker holds its lock: its server may run in another container."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
    finally:
        os.close(handle)
