"""Find the CUDA compiler of this machine."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sglang_hybrid.ops.cuda.errors import CudaError

_PLACES = (Path("/usr/local/cuda/bin/nvcc"),)  # where NVIDIA's packages put it


@dataclass(frozen=True)
class Nvcc:
    path: Path
    version: str  # such as 13.0.88


@functools.cache
def find_nvcc() -> Nvcc | None:
    """Return nvcc and its version, or None if there is no compiler. Raises CudaError if nvcc does not tell its version.

    With ``$CUDA_HOME`` set, only ``$CUDA_HOME/bin/nvcc`` is tried; otherwise the one on the PATH, or, if there is none,
    the location of NVIDIA's packages.
    """
    home = os.environ.get("CUDA_HOME")
    if home:
        candidates = [Path(home) / "bin" / "nvcc"]
    else:
        on_path = shutil.which("nvcc")
        candidates = [Path(on_path)] if on_path else list(_PLACES)
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        return None
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"\bV(\d+\.\d+\.\d+)", told.stdout)
    if told.returncode or version is None:
        raise CudaError(f"{path} does not tell its version: {(told.stderr or told.stdout).strip()[:200]}")
    return Nvcc(path, version.group(1))
