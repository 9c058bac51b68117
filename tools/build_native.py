#!/usr/bin/env python3
"""Build the CPU kernels and the worker engine with CMake, into the package.

    python3 tools/build_native.py [--build-dir build/native] [--jobs N] [--no-cache]

Needs CMake 3.22 and a C++20 compiler. Installing the package does the same (setup.py). A library is kept in the
user's cache under a hash of its sources and its compiler, so another checkout of the same sources compiles nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package itself is not installed yet

from sglang_hybrid.user_cache import default_cache_dir  # noqa: E402

SOURCE = ROOT / "kernels" / "cpu"
TARGET = ROOT / "sglang_hybrid" / "ops" / "cpu"
LIBRARY = "libsglang_hybrid_cpu.so"
BUILT_FROM = ".built-from"  # beside the library: the hash of what it was built from


def build(build_dir: Path, target: Path, jobs: int, *definitions: str) -> None:
    """Configure, build and install. ``definitions`` are CMake's -D settings."""
    _forget_another_place(build_dir)
    configure = ["cmake", "-S", str(SOURCE), "-B", str(build_dir), "-DCMAKE_BUILD_TYPE=Release"]
    for command in (
        [*configure, *(f"-D{definition}" for definition in definitions)],
        ["cmake", "--build", str(build_dir), "--parallel", str(jobs)],
        ["cmake", "--install", str(build_dir), "--prefix", str(target)],
    ):
        _run(command)


def _forget_another_place(build_dir: Path) -> None:
    """CMake refuses a build directory that was copied or moved with its checkout."""
    cache = build_dir / "CMakeCache.txt"
    if cache.is_file() and f"CMAKE_CACHEFILE_DIR:INTERNAL={build_dir.resolve()}\n" not in cache.read_text():
        cache.unlink()
        shutil.rmtree(build_dir / "CMakeFiles", ignore_errors=True)


def source_hash() -> str:
    """Of everything that decides what the library contains: sources, this file, compiler, flags, processor."""
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


def is_current(target: Path = TARGET) -> bool:
    """Whether the library in ``target`` was built from the sources as they are now."""
    built_from = target / BUILT_FROM
    return (target / LIBRARY).is_file() and built_from.is_file() and built_from.read_text() == source_hash()


def provide(build_dir: Path, target: Path, jobs: int, cache: Path | None) -> str:
    """Put the library into ``target`` unless it is there, out of ``cache`` if that has it. Returns what was done."""
    build_dir.mkdir(parents=True, exist_ok=True)
    with (build_dir / ".lock").open("w") as lock:  # make serve and make test may be started at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_current(target):
            return "up to date"
        version = source_hash()
        kept = cache / f"{version}.so" if cache else None
        if kept and kept.is_file():
            done = "from the cache"
            _replace(kept, target / LIBRARY)
        else:
            done = "built"
            staging = build_dir / "staging"
            build(build_dir, staging, jobs)
            if kept:
                _keep(staging / LIBRARY, kept)
            _replace(staging / LIBRARY, target / LIBRARY)
        (target / BUILT_FROM).write_text(version)
        return done


def _keep(library: Path, kept: Path) -> None:
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        _replace(library, kept)
    except OSError as error:  # only the next checkout would be faster
        print(f"the library is not kept in {kept.parent}: {error}")


def _replace(source: Path, target: Path) -> None:
    """Copy, then rename: a process that has mapped the old library keeps it."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, partial)
    partial.chmod(0o755)
    partial.replace(target)


def _run(command: list[str]) -> None:
    # the CMake of the environment that runs this, if it has one, before the machine's
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError:
        sys.exit("there is no cmake: install it with pip install cmake, or your distribution's package")
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\nfailed with status {done.returncode}: {' '.join(command)}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "native")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-cache", action="store_true", help="build it, and keep it only in the package")
    args = parser.parse_args(arguments)
    cache = None if args.no_cache else default_cache_dir() / "native"
    print(f"{TARGET / LIBRARY}: {provide(args.build_dir, TARGET, args.jobs, cache)}")


if __name__ == "__main__":
    main()
