"""The shared region: host memory that a worker process and a GPU can access too.

The memory is a memfd, which has no name in any file system and exists exactly as long as some process has it open or
mapped. So a killed server leaves nothing behind. Another process gets access by receiving the descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from sglang_hybrid.protocol.aligned_mapping import map_aligned, unmap
from sglang_hybrid.protocol.alignment import ALIGNMENT

_PREFAULT_CHUNK = 64 << 20
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25  # Linux 5.14, 6.1
_F_SEAL_FUTURE_WRITE = 0x10  # existing mappings stay writable, new ones cannot be writable
_libc = ctypes.CDLL(None, use_errno=True)

logger = logging.getLogger("sglang.srt.hybrid")


class RegionError(RuntimeError):
    """The region cannot be allocated or is used up. The message says how many bytes were requested."""


class SharedRegion:
    """A memfd, mapped once, from which tensors are allocated front to back.

    All memory is allocated at construction, not at the first write. So a region that does not fit fails at the start,
    with a number, and not under load.
    """

    def __init__(
        self, size: int, name: str = "sglang-hybrid", *, others_write: bool = False, cpus: Collection[int] = ()
    ) -> None:
        """Allocate ``size`` bytes, rounded up. Raise RegionError if that fails.

        ``others_write``: a process that receives the descriptor may map it for writing.
        ``cpus``: CPUs from whose NUMA node to allocate, as long as the node has free memory; empty: any node.
        """
        self.size = _round_up(size)
        self._used = 0
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size)
            self.address = map_aligned(self.fd, self.size, writable=True)  # in this process
            # tensors refer to this object, which therefore lives as long as the last of them
            self._memory = (ctypes.c_char * self.size).from_address(self.address)
            weakref.finalize(self._memory, unmap, self.address, self.size).atexit = False
            # the kernel chooses the pages at the first access, so the advice must come before it
            self._advise(0, self.size, mmap.MADV_HUGEPAGE)  # refused by kernels without huge pages for shared memory
            self._advise(0, self.size, mmap.MADV_DONTDUMP)  # no users' prompts in a core file, which would be large
            self._prefault(cpus)
            # from here on no process can shrink the region, which would kill processes that read beyond its new end
            self._seal(others_write)
        except (OSError, ValueError, OverflowError) as e:
            os.close(self.fd)
            raise RegionError(f"cannot take {self.size / 2**30:.2f} GiB of shared host memory: {e}") from e

    def _seal(self, others_write: bool) -> None:
        if not others_write:
            with contextlib.suppress(OSError):  # kernels before 5.1 do not have this seal
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def _prefault(self, cpus: Collection[int]) -> None:
        """Allocate every page, in parallel: one thread would be limited by one core's store rate while zeroing.

        A page comes from the NUMA node of the thread that accesses it first. A memory policy (mbind) would achieve the
        same, but containers forbid it. Raise OSError if there is not enough memory.
        """

        def go_near() -> None:
            try:
                os.sched_setaffinity(0, cpus)
            except OSError as error:
                logger.warning("host memory may be on another NUMA node than the GPU: %s", error)

        def populate(start: int, length: int) -> None:
            # not fallocate, which holds a lock on the whole file; page faults do not
            if error := self._advise(start, length, _MADV_POPULATE_WRITE):
                if error != errno.EINVAL:  # kernels before 5.14 do not have this advice
                    raise OSError(error, os.strerror(error))
                os.posix_fallocate(self.fd, start, length)

        def take(start: int) -> None:
            length = min(_PREFAULT_CHUNK, self.size - start)
            for first in range(start, start + length, ALIGNMENT):
                populate(first, mmap.PAGESIZE)  # a huge page can only be made of a range that has some page
            # Huge pages even where the system gives none to shared memory by itself. Without the advice, or if no huge
            # page is free, the pages stay small.
            self._advise(start, length, _MADV_COLLAPSE)
            populate(start, length)

        threads = len(cpus) or os.cpu_count() or 1
        with ThreadPoolExecutor(threads, initializer=go_near if cpus else None) as pool:
            list(pool.map(take, range(0, self.size, _PREFAULT_CHUNK)))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate the next piece of the region and return it as a zeroed tensor. Raise RegionError if none is left."""
        count = 1
        for extent in shape:
            count *= extent
        start, end = self._used, self._used + count * dtype.itemsize
        if end > self.size:
            raise RegionError(f"the region of {self.size} bytes is used up: {end - self.size} bytes are missing")
        self._used = _round_up(end)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(shape)

    def _advise(self, start: int, length: int, advice: int) -> int:
        """Give ``advice`` about a part of the mapping. Return 0, or the error number of the system that refuses it."""
        refused = _libc.madvise(ctypes.c_void_p(self.address + start), ctypes.c_size_t(length), advice)
        return ctypes.get_errno() if refused else 0

    def huge_bytes(self) -> int:
        """Return how many bytes of the region are in huge pages."""
        is_here = False
        with open("/proc/self/smaps") as mappings:
            for line in mappings:
                name, value, *_ = line.split()
                if not name.endswith(":"):  # the first line of a mapping
                    is_here = int(name.split("-")[0], 16) == self.address
                elif is_here and name == "ShmemPmdMapped:":
                    return int(value) << 10
        return 0

    @staticmethod
    def size_for(*pieces: int) -> int:
        """Return the bytes of a region from which pieces of these sizes, in bytes, can be allocated."""
        return sum(_round_up(piece) for piece in pieces)

    def close(self) -> None:
        """Close the descriptor. The mapping stays as long as tensors in it exist. Further calls do nothing."""
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
