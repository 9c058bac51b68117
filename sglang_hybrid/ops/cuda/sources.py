"""Source files of the CUDA kernels, and a hash that changes when one of them or a compiler flag changes."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from sglang_hybrid.ops.cuda.errors import CudaError

_IN_WHEELS = Path(__file__).resolve().parents[2] / "kernels"  # where setup.py puts them
_KERNELS = _IN_WHEELS if _IN_WHEELS.is_dir() else Path(__file__).resolve().parents[3] / "kernels"
# the CPU library's headers include mailbox.h, the only definition of the mailbox's layout
INCLUDES = (_KERNELS / "cuda" / "include", _KERNELS / "cpu" / "include")
FLAGS = ("-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-shared")


def translation_units() -> list[Path]:
    units = sorted((_KERNELS / "cuda" / "src").glob("*.cu"))
    if not units:
        raise CudaError(f"the CUDA sources are not in {_KERNELS / 'cuda'}: install the package again")
    return units


@functools.cache
def source_hash() -> str:
    """Return a hash of the flags and of all source and header files: twelve hexadecimal digits."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    folders = (_KERNELS / "cuda" / "src", *INCLUDES)
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(_KERNELS)).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
