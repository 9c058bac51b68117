"""Compile the CPU kernels with CMake: when the package is built, or when the library in the package does not load.

Files in the cache directory (``SGLANG_HYBRID_CACHE``), under ``native``:

    .SOURCES.lock    held (flock) while a process compiles; the kernel frees it when that process dies
    SOURCES.so       appears by rename, complete

SOURCES is a hash of the sources and of the compiler. Compiling needs CMake 3.22 and a C++20 compiler. This module uses
only Python's standard library, because it runs before any dependency is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang_hybrid.user_cache import default_cache_dir

_IN_WHEELS = Path(__file__).resolve().parents[2] / "kernels" / "cpu"  # where setup.py puts the sources
SOURCE = _IN_WHEELS if _IN_WHEELS.is_dir() else Path(__file__).resolve().parents[3] / "kernels" / "cpu"
LIBRARY = "libsglang_hybrid_cpu.so"

log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """The library cannot be compiled on this machine. The message says what to do."""


def cache_folder() -> Path:
    return default_cache_dir() / "native"


def build(build_dir: Path, target: Path, jobs: int, *definitions: str) -> None:
    """Configure and build in ``build_dir``, and install to ``target``. Raise BuildError if a command fails.

    ``definitions`` are CMake's -D settings, such as "NAME=VALUE".
    """
    _forget_another_place(build_dir)
    configure = ["cmake", "-S", str(SOURCE), "-B", str(build_dir), "-DCMAKE_BUILD_TYPE=Release"]
    for command in (
        [*configure, *(f"-D{definition}" for definition in definitions)],
        ["cmake", "--build", str(build_dir), "--parallel", str(jobs)],
        ["cmake", "--install", str(build_dir), "--prefix", str(target)],
    ):
        _run(command)


def built() -> Path:
    """Return the library in the cache, after compiling it if necessary. Raise BuildError if that is not possible."""
    if find_compiler() is None:
        raise BuildError("there is no C++ compiler: install one (g++ 11 or newer), or name one with CXX")
    kept = cache_folder() / f"{source_hash()}.so"
    if kept.is_file():
        return kept
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (kept.parent / f".{kept.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.is_file():  # otherwise the process that held the lock has compiled it
                log.warning("compiling the CPU kernels for this machine, once: this takes a minute")
                with tempfile.TemporaryDirectory(prefix="sglang-hybrid-build-") as work:
                    build(Path(work) / "build", Path(work) / "made", os.cpu_count() or 1)
                    replace(Path(work) / "made" / LIBRARY, kept)
    except OSError as error:
        raise BuildError(
            f"cannot write the CPU kernels to {kept.parent}: {error}; choose another place with SGLANG_HYBRID_CACHE"
        ) from error
    return kept


def source_hash() -> str:
    """Return a hash of all that decides what the library contains: sources, this file, compiler, flags, processor."""
    digest = hashlib.sha256(
        "\n".join([platform.machine(), compiler_version(), os.environ.get("CXXFLAGS", "")]).encode()
    )
    sources = [path for path in SOURCE.rglob("*") if path.is_file() and "tests" not in path.relative_to(SOURCE).parts]
    for path in [Path(__file__), *sorted(sources)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")


def compiler_version() -> str:
    compiler = find_compiler()
    if compiler is None:
        return ""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def replace(source: Path, target: Path) -> None:
    """Replace ``target`` by a copy of ``source``. A process that has mapped the old file keeps the old file."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, partial)
    partial.chmod(0o755)
    partial.replace(target)


def _forget_another_place(build_dir: Path) -> None:
    """Remove CMake's cache if ``build_dir`` was copied or moved with its checkout: CMake would refuse to build."""
    cache = build_dir / "CMakeCache.txt"
    if cache.is_file() and f"CMAKE_CACHEFILE_DIR:INTERNAL={build_dir.resolve()}\n" not in cache.read_text():
        cache.unlink()
        shutil.rmtree(build_dir / "CMakeFiles", ignore_errors=True)


def _run(command: list[str]) -> None:
    # cmake of this Python environment, if it has one, comes before the machine's
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError:
        raise BuildError(
            "there is no cmake: install it with pip install cmake, or your distribution's package"
        ) from None
    if done.returncode:
        raise BuildError(f"{done.stdout[-4000:]}\nfailed with status {done.returncode}: {' '.join(command)}")
