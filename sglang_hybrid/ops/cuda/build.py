"""Compile the CUDA kernels for an architecture, once: ``python -m sglang_hybrid.ops.cuda.build --arch 80 90 100``.

In the cache directory (``SGLANG_HYBRID_CACHE``), under ``cuda``:

    .SOURCES-sm90.lock             held (flock) while a process compiles; the kernel frees it when that process dies
    SOURCES-sm90-nvcc13.0.88.so    renamed into place when it is complete

A host without a compiler uses a library in this directory that another host compiled from the same sources.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang_hybrid.ops.cuda.errors import CudaError
from sglang_hybrid.ops.cuda.sources import FLAGS, INCLUDES, source_hash, translation_units
from sglang_hybrid.ops.cuda.toolchain import Nvcc, find_nvcc
from sglang_hybrid.user_cache import default_cache_dir

QUICK_FLAGS = ("-Xcicc", "-O1", "-Xptxas", "-O1")
OLDEST = 80  # oldest compute capability with cp.async, bf16 products and system-scope release


def find_built(architecture: int) -> Path | None:
    """Return the cached library for ``architecture`` (90 is sm_90), or None if it is not compiled. Compiles nothing."""
    folder, name, nvcc = cache_folder(), _name(architecture), find_nvcc()
    if nvcc is None:  # take a library that another host compiled, with any compiler version
        return max(folder.glob(f"{name}-nvcc*.so"), default=None)
    target = folder / f"{name}-nvcc{nvcc.version}.so"
    return target if target.is_file() else None


def built(architecture: int) -> Path:
    """Return the library for ``architecture`` (90 is sm_90), after compiling it if it is not in the cache.

    Raises CudaError if the architecture is too old, if there is no compiler, or if compiling or writing fails.
    """
    if architecture < OLDEST:
        raise CudaError(f"the CUDA kernels need compute capability {OLDEST / 10} or newer, not {architecture / 10}")
    if found := find_built(architecture):
        return found
    folder, name, nvcc = cache_folder(), _name(architecture), find_nvcc()
    if nvcc is None:
        raise CudaError(
            "there is no CUDA compiler: set CUDA_HOME or put nvcc on the PATH, or fill the cache on a host that has "
            f"one (python -m sglang_hybrid.ops.cuda.build --arch {architecture}); it would be in {folder}"
        )
    target = folder / f"{name}-nvcc{nvcc.version}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_file():  # otherwise the process that held the lock has compiled the library
                _compile(nvcc, architecture, target)
    except OSError as error:
        raise CudaError(
            f"cannot write the CUDA kernels to {folder}: {error}; choose another place with SGLANG_HYBRID_CACHE"
        ) from error
    return target


def cache_folder() -> Path:
    return default_cache_dir().expanduser() / "cuda"


def _name(architecture: int) -> str:
    return f"{source_hash()}-sm{architecture}"


def _compile(nvcc: Nvcc, architecture: int, target: Path, *, quickly: bool = False) -> None:
    """Compile the kernels to ``target``. ``quickly``: with little optimization, to check only that they compile."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.stem}-") as work:
        made = Path(work) / target.name
        command = [
            str(nvcc.path), *FLAGS, "--threads", "0", *(f"-I{path}" for path in INCLUDES),
            "-gencode", f"arch=compute_{architecture},code=sm_{architecture}",
            *(QUICK_FLAGS if quickly else ()), *map(str, translation_units()), "-o", str(made),
        ]  # fmt: skip
        environment = os.environ | {"TMPDIR": work}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stdout + done.stderr).strip()[-4000:]
            raise CudaError(f"nvcc {nvcc.version} failed for sm_{architecture}:\n{said}\n{' '.join(command)}")
        made.chmod(0o700)  # regardless of the umask: files that others may write are refused when loaded
        made.rename(target)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", required=True, help="compute capabilities, such as 80 90 100")
    for architecture in parser.parse_args(arguments).arch:
        try:
            print(built(architecture), flush=True)
        except CudaError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
