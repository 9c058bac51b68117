"""Mappings of memory files whose pages can be huge ones: they begin at a multiple of a huge page's size."""

from __future__ import annotations

import ctypes
import mmap
import os

from sglang_hybrid.protocol.alignment import ALIGNMENT

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_aligned(fd: int, size: int, *, writable: bool) -> int:
    """Map the first ``size`` bytes of ``fd``, shared, and return the address. Raise OSError if the system refuses.

    By itself the kernel aligns shared memory only where it is set to give huge pages for it, which only root can do.
    """
    # a larger piece of address space, of which the mapping replaces an aligned part
    reserved = _map(None, size + ALIGNMENT, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-reserved // ALIGNMENT) * ALIGNMENT
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _map(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        unmap(reserved, size + ALIGNMENT)
        raise
    whole_pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    unmap(reserved, address - reserved)
    unmap(address + whole_pages, reserved + ALIGNMENT - address + size - whole_pages)
    return address


def unmap(address: int, size: int) -> None:
    if size > 0:
        _libc.munmap(address, size)


def _map(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _libc.mmap(address, size, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
