"""The shared region: host memory that a worker process and a GPU can reach too.

A memfd has no name in any file system: it lives exactly as long as some process has it
open or mapped, so a killed server leaves nothing behind, and another process gets it by
being handed the descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from sglang_hybrid.protocol.alignment import ALIGNMENT

_PREFAULT_CHUNK = 64 << 20
_MADV_POPULATE_WRITE = 23
_F_SEAL_FUTURE_WRITE = 0x10  # mappings that exist stay writable, new ones cannot be
_libc = ctypes.CDLL(None, use_errno=True)

logger = logging.getLogger("sglang.srt.hybrid")


class RegionError(RuntimeError):
    """The region could not be had; the message says how much was asked for."""


class SharedRegion:
    """One memfd, mapped once, handed out front to back as tensors.

    Memory is taken when the region is made, not when it is first written: what does not
    fit fails here, with a number, and not under load.
    """

    def __init__(
        self, size: int, name: str = "sglang-hybrid", *, others_write: bool = False, cpus: Collection[int] = ()
    ) -> None:
        """``others_write``: who is handed the descriptor may map it for writing.

        ``cpus``: whose NUMA node the memory shall come from, as long as that has some; empty: any.
        """
        self.size = _round_up(size)
        self._used = 0
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size)
            # backing memory is chosen at first touch, so the advice has to come before it
            self._map = mmap.mmap(self.fd, self.size)
            with contextlib.suppress(OSError):  # kernels without huge pages for shared memory
                self._map.madvise(mmap.MADV_HUGEPAGE)
            self._map.madvise(mmap.MADV_DONTDUMP)  # what users asked is nothing for a core file, and it is large
            self._prefault(cpus)
            # nobody can shrink it from here on, so no process that maps it can be killed by reading beyond its end
            self._seal(others_write)
        except (OSError, ValueError, OverflowError) as e:
            os.close(self.fd)
            raise RegionError(f"cannot take {self.size / 2**30:.2f} GiB of shared host memory: {e}") from e

    def _seal(self, others_write: bool) -> None:
        if not others_write:
            with contextlib.suppress(OSError):  # a kernel before 5.1 does not know it
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def _prefault(self, cpus: Collection[int]) -> None:
        """Allocate every page, in parallel: zeroing is bound by one core's store rate otherwise.

        Memory comes from the node of the thread that touches it first. A policy (mbind) would do as well, but
        containers forbid it.
        """

        def go_near() -> None:
            try:
                os.sched_setaffinity(0, cpus)
            except OSError as error:
                logger.warning("host memory may be on another NUMA node than the GPU: %s", error)

        def take(start: int) -> None:
            length = min(_PREFAULT_CHUNK, self.size - start)
            # fallocate would do, but holds a lock of the whole file; faults do not
            if _libc.madvise(ctypes.c_void_p(self.address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                error = ctypes.get_errno()
                if error != errno.EINVAL:  # a kernel before 5.14 does not know the advice
                    raise OSError(error, os.strerror(error))
                os.posix_fallocate(self.fd, start, length)

        threads = len(cpus) or os.cpu_count() or 1
        with ThreadPoolExecutor(threads, initializer=go_near if cpus else None) as pool:
            list(pool.map(take, range(0, self.size, _PREFAULT_CHUNK)))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next piece of the region as a zeroed tensor."""
        count = 1
        for extent in shape:
            count *= extent
        start, end = self._used, self._used + count * dtype.itemsize
        if end > self.size:
            raise RegionError(f"the region of {self.size} bytes is used up: {end - self.size} bytes are missing")
        self._used = _round_up(end)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)

    @property
    def address(self) -> int:
        """Where the region is mapped in this process."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()

    @staticmethod
    def size_for(*pieces: int) -> int:
        """Bytes of a region that can hand out pieces of these sizes."""
        return sum(_round_up(piece) for piece in pieces)

    def close(self) -> None:
        """Close the descriptor. The mapping stays as long as tensors of it do."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> SharedRegion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
