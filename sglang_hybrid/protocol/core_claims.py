"""Workers of one user agree on cores: each holds a lock for every CPU that its threads are bound to.

A lock is one of the system's (flock) on an empty file of a directory of mode 0700, and ends with the process that holds
it, however that ends. Workers that cannot see each other's temporary files, such as those of two containers, do not
agree.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from sglang_hybrid.protocol.cores import Placement, Topology, place

_CHOOSING_SECONDS = 2.0  # that another worker may take to choose its cores
_NAP_SECONDS = 0.01

log = logging.getLogger(__name__)


def directory_of_user() -> Path:
    return Path(tempfile.gettempdir()) / f"hybrid-worker-cores-{os.geteuid()}"


class CoreClaims:
    """The locks of one worker: none before ``claim`` and after ``release``."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or directory_of_user()
        self._locks: dict[int, int] = {}  # CPU -> descriptor

    def claim(
        self, topology: Topology, cores: str, threads: int, group_threads: int
    ) -> tuple[Placement, frozenset[int]]:
        """``place``, where other workers left cores free, and the CPUs that they are bound to.

        Listed cores are had in any case. Where locks cannot be had, nothing is known of other workers. Raises
        CoresError; then the locks are as before.
        """
        place(topology, cores, threads, group_threads)
        self.release()
        try:
            with _opened(self._directory) as folder, _choosing(folder):
                taken = self._lock_all(folder, topology.cpus)
                placed = place(replace(topology, taken=taken), cores, threads, group_threads)
                for cpu in topology.cpus.difference(placed.cores, taken):
                    os.close(self._locks.pop(cpu))
        except OSError as error:
            self.release()
            log.warning("workers cannot agree on cores, set worker_cores if there are several: %s", error)
            return place(topology, cores, threads, group_threads), frozenset()
        return placed, taken

    def release(self) -> None:
        """Idempotent."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def _lock_all(self, folder: int, cpus: Iterable[int]) -> frozenset[int]:
        """Lock what is free, return what is not. Raises OSError."""
        taken = set()
        for cpu in cpus:
            if (lock := _lock(folder, cpu)) is None:
                taken.add(cpu)
            else:
                self._locks[cpu] = lock
        return frozenset(taken)


def taken_cpus(cpus: Iterable[int], directory: Path | None = None) -> frozenset[int]:
    """Those of ``cpus`` that a worker is bound to now. Makes no file."""
    taken = set()
    with contextlib.suppress(OSError), _opened(directory or directory_of_user(), make=False) as folder:
        for cpu in cpus:
            with contextlib.suppress(FileNotFoundError):
                lock = _lock(folder, cpu, shared=True)
                if lock is None:
                    taken.add(cpu)
                else:
                    os.close(lock)
    return frozenset(taken)


@contextlib.contextmanager
def _opened(directory: Path, make: bool = True) -> Iterator[int]:
    """Raises OSError unless the directory is this user's alone."""
    if make:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            raise PermissionError(f"{directory} must belong to user {os.geteuid()} and have mode 0700")
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def _choosing(folder: int) -> Iterator[None]:
    """One worker at a time: two that look at once would each find cores taken that the other lets go of."""
    deadline = time.monotonic() + _CHOOSING_SECONDS
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another worker has been choosing for {_CHOOSING_SECONDS:.0f} s") from None
            time.sleep(_NAP_SECONDS)
    yield  # closing the descriptor ends the lock


def _lock(folder: int, cpu: int, shared: bool = False) -> int | None:
    """A descriptor that holds the lock of a CPU, None if a worker has it. Raises OSError.

    ``shared``: only to look, which must not keep a worker from it for longer than that, nor make the file.
    """
    flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
    lock = os.open(f"cpu{cpu}", flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock
