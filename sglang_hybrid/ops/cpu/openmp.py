"""Search for the OpenMP runtime that this process has loaded already, usually torch's."""

from __future__ import annotations

import ctypes
from pathlib import Path

_RUNTIMES = ("libgomp", "libiomp5", "libomp")  # all of them have GOMP_parallel


def gomp_parallel() -> int | None:
    """Return the address of ``GOMP_parallel``, which runs a function in OpenMP's threads; None without a runtime.

    Threads of our own would compete with OpenMP's threads, which may be awake and waiting for torch's next operation.
    """
    paths = {line.split(maxsplit=5)[5].strip() for line in _maps() if "/" in line}
    for path in sorted(paths):
        if Path(path).name.startswith(_RUNTIMES):
            try:
                function = ctypes.CDLL(path).GOMP_parallel
            except (OSError, AttributeError):
                continue
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _maps() -> list[str]:
    try:
        return Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
