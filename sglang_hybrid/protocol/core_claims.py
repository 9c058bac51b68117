"""Claims to cores, by which workers of one user avoid each other's cores.

Each worker holds a lock for every CPU that its threads are bound to. A lock is a flock on an empty file in a directory
of mode 0700, and is freed by the kernel when the process that holds it ends for any reason. Workers that cannot see
each other's temporary files, such as workers in two containers, do not see each other's claims.
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

_CHOOSING_SECONDS = 2.0  # most time to wait while another worker chooses its cores
_NAP_SECONDS = 0.01

log = logging.getLogger(__name__)


def directory_of_user() -> Path:
    return Path(tempfile.gettempdir()) / f"hybrid-worker-cores-{os.geteuid()}"


class CoreClaims:
    """The locks of one worker. It holds none before ``claim`` and after ``release``."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or directory_of_user()
        self._locks: dict[int, int] = {}  # CPU -> descriptor

    def claim(
        self, topology: Topology, cores: str, threads: int, group_threads: int
    ) -> tuple[Placement, frozenset[int]]:
        """Place threads (see ``place``) on cores that no other worker has claimed, and lock the CPUs of the placement.

        Return the placement and the CPUs that other workers are bound to. Listed cores are used even if another worker
        has claimed them. If locks do not work, place as if there were no other worker. Raise CoresError if the request
        is not possible; then the locks are as before.
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
        """Free all locks. Further calls do nothing."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def _lock_all(self, folder: int, cpus: Iterable[int]) -> frozenset[int]:
        """Lock all free CPUs of ``cpus`` and return those that another worker holds. Raise OSError if locks fail."""
        taken = set()
        for cpu in cpus:
            if (lock := _lock(folder, cpu)) is None:
                taken.add(cpu)
            else:
                self._locks[cpu] = lock
        return frozenset(taken)


def taken_cpus(cpus: Iterable[int], directory: Path | None = None) -> frozenset[int]:
    """Return those of ``cpus`` that a worker is bound to now. Create no file."""
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
    """Open the directory of locks, created if ``make`` is True, and yield its descriptor.

    Raise OSError if the directory does not exist, or unless it belongs to this user and has mode 0700.
    """
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
    """Let only one worker at a time choose cores. Raise TimeoutError if another worker takes too long.

    A choosing worker first locks all free cores, so two workers choosing at once would find cores taken that the other
    one frees again.
    """
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
    """Lock a CPU. Return a descriptor that holds the lock, or None if a worker holds it. Raise OSError if locks fail.

    ``shared``: only test the lock. Create no file, and raise FileNotFoundError if the file does not exist. The caller
    closes the descriptor at once, so that no worker is kept from the CPU.
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
