"""The processes of one launcher, and the files that they leave behind.

All temporary files of the processes go into the run's own directory, which is removed at the end: logs, sockets,
SGLang's files, the worker's directory. Files stay only if launcher and guard are both killed, and the next start
removes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import getpass
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from sglang_hybrid import env
from sglang_hybrid.commands import shared_memory
from sglang_hybrid.commands.child_process import ChildProcess
from sglang_hybrid.commands.guard import Guard
from sglang_hybrid.events import Reader
from sglang_hybrid.worker.process import PREFIX, remove_leftovers

_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_TEMPORARY = 40  # bytes: sockets are two directories deeper, and the path of a Unix socket has at most 107
_KILL_SECONDS = 30  # the kernel takes that long to free hundreds of GiB of pinned memory


class Run:
    """Context manager for the processes of one launcher.

    After the context no process, directory, socket, shared-memory file or semaphore is left.
    """

    def __init__(self) -> None:
        remove_leftovers()
        self.directory = _new_directory()
        # The lock marks the directory as used, also for a launcher in another container. The guard inherits the lock.
        self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self.children: list[ChildProcess] = []
        self._shared: set[int] = set()  # inodes in /dev/shm
        # Orphaned descendants become children of this process, which finds and ends them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._guard = Guard(lambda watched: self._end(lambda: watched))
        self.events = Reader(self.directory / "events")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._processes)
        for child in self.children:
            child.process.wait()
        self.events.close()
        self._guard.close()
        os.close(self._lock)

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, log: Path | None = None
    ) -> ChildProcess:
        """Start a child process. ``log``: the file for its output; by default ``NAME.log`` in the run's directory."""
        places = {"TMPDIR": str(self.directory), env.EVENTS.name: str(self.events.path)}
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # compiled kernels outlive a run
            places["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
        log = log or self.directory / f"{name}.log"
        child = ChildProcess(name, command, log, {**places, **(environment or {})})
        self.children.append(child)
        self._guard.watches(child.process.pid)
        return child

    def note_shared_memory(self) -> None:
        """Record which files in /dev/shm the processes map now: the mappings are gone once the processes have ended."""
        self._shared |= shared_memory.files_mapped_by(process.pid for process in _family(self._processes()))

    def _processes(self) -> list[psutil.Process]:
        """Return all children of this process but the guard: those it started, and their orphaned descendants."""
        return [child for child in psutil.Process().children() if child.pid != self._guard.pid]

    def _end(self, processes: Callable[[], list[psutil.Process]]) -> None:
        """Kill the processes and their descendants and remove all files. The guard calls this for a killed launcher."""
        deadline = time.monotonic() + _KILL_SECONDS
        while (family := _family(processes())) and time.monotonic() < deadline:
            self._shared |= shared_memory.files_mapped_by(process.pid for process in family)
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(family, timeout=1)
        shared_memory.remove(self._shared)
        shutil.rmtree(self.directory, ignore_errors=True)


def _family(roots: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return ``roots`` and all their descendants that still run."""
    found: dict[int, psutil.Process] = {}
    for root in roots:
        with contextlib.suppress(psutil.Error):
            for process in (root, *root.children(recursive=True)):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process
    return list(found.values())


def _new_directory() -> Path:
    temporary = tempfile.gettempdir()
    where = temporary if len(os.fsencode(temporary)) <= _LONGEST_TEMPORARY else "/tmp"
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where))
