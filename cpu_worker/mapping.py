"""Mapping of a memory file into this process at a known address, for code that takes pointers."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sglang_hybrid.protocol.aligned_mapping import map_aligned, unmap

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
_CHUNK = 64 << 20  # bytes; small enough to notice soon that populating is cancelled

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """Shared mapping of the first ``size`` bytes of ``fd``. The descriptor may be closed once the mapping exists.

    No address within the mapping may be used after ``close``, so threads that compute on the mapping must be stopped
    before.
    """

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        """Map the file. Raise OSError if the system refuses."""
        self.address = map_aligned(fd, size, writable=writable)
        _libc.madvise(self.address, size, mmap.MADV_DONTDUMP)
        self.size = size
        self._populate_advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ

    def populate(self, threads: int, cancelled: Callable[[], bool]) -> None:
        """Enter every page into this process's page table, so that no later access has to wait for a page fault.

        Return early when ``cancelled`` returns True. Raise OSError if there is no memory behind the file, where an
        access would be fatal. Do nothing on kernels without this advice of madvise (before Linux 5.14).
        """

        def enter(start: int) -> None:
            if cancelled():
                return
            bytes_ = min(_CHUNK, self.size - start)
            if _libc.madvise(self.address + start, bytes_, self._populate_advice):
                number = ctypes.get_errno()
                if number != errno.EINVAL:
                    raise OSError(number, os.strerror(number))

        chunks = range(0, self.size, _CHUNK)
        if threads <= 1:
            for start in chunks:
                enter(start)
            return
        with ThreadPoolExecutor(max_workers=threads) as pool:
            list(pool.map(enter, chunks))

    def close(self) -> None:
        """Unmap the file. Further calls do nothing."""
        if self.address:
            unmap(self.address, self.size)
            self.address = 0
