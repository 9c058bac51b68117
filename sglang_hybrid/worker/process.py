"""A worker process that this process starts, in a directory of its own."""

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
    """Starts at once; ``end`` must be called, also when the process has died by itself."""

    def __init__(self) -> None:
        """Raises OSError when there is no room for a directory or no process to be had."""
        # the socket's path has to be short, so the directory for temporary files it is; 0700 by mkdtemp
        self.directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        try:
            self._process = subprocess.Popen(
                # -P: nothing is imported from the directory that the server happens to be started in
                [sys.executable, "-P", "-m", "cpu_worker", "--dir", str(self.directory), "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the server, which ends its worker
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
        """End the process if it still runs, wait for it, remove its directory. How it ended, in words."""
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
        """For a process that does not answer."""
        self._process.kill()


def _remove(directory: Path) -> None:
    """Also where no descriptor is left, which rmtree needs."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        place = WorkerDirectory(directory)
        for socket in (place.control, place.regions):
            socket.unlink(missing_ok=True)
        directory.rmdir()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # Python has names for the first and the last real-time signal only
        return f"signal {number}"


def remove_leftovers() -> None:
    """Remove directories of servers that were killed together with their workers and could not do it themselves."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}[0-9]*-*"):
        owner = directory.name.removeprefix(PREFIX).split("-")[0]
        with contextlib.suppress(OSError, OverflowError):  # a number that no process can have
            if owner.isdigit() and directory.stat().st_uid == os.getuid() and not psutil.pid_exists(int(owner)):
                _remove_unlocked(directory)


def _remove_unlocked(directory: Path) -> None:
    """A living worker holds a lock on its directory: its server may be one of another container. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
    finally:
        os.close(handle)
