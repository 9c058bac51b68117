"""The compiler that this machine has."""

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
    """``$CUDA_HOME/bin/nvcc``, else the one on the path or where NVIDIA's packages put it; None without a compiler."""
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
