#!/usr/bin/env python3
"""Build the CPU kernels and the worker engine with CMake, into the package.

    python3 tools/build_native.py [--build-dir build/native] [--jobs N] [--no-cache]

The build needs CMake 3.22 and a C++20 compiler. Installing the package does the same (setup.py). The library is kept
in the user's cache under a hash of its sources and its compiler, so another checkout of the same sources compiles
nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package itself is not installed yet
_loaded = getattr(sys.modules.get("sglang_hybrid"), "__file__", None)
if _loaded and ROOT not in Path(_loaded).resolve().parents:
    # a CPU host imports the installed package at the start of Python, and that may be another version
    for _name in [name for name in sys.modules if name.split(".")[0] == "sglang_hybrid"]:
        del sys.modules[_name]

from sglang_hybrid.ops.cpu.build import (  # noqa: E402
    LIBRARY,
    BuildError,
    build,
    cache_folder,
    find_compiler,
    replace,
    source_hash,
)

__all__ = ["LIBRARY", "build", "find_compiler", "is_current", "main", "provide", "source_hash"]

TARGET = ROOT / "sglang_hybrid" / "ops" / "cpu"
BUILT_FROM = ".built-from"  # file beside the library with the hash of what the library was built from


def is_current(target: Path = TARGET) -> bool:
    """Return True if the library in ``target`` was built from the current sources."""
    built_from = target / BUILT_FROM
    return (target / LIBRARY).is_file() and built_from.is_file() and built_from.read_text() == source_hash()


def provide(build_dir: Path, target: Path, jobs: int, cache: Path | None) -> str:
    """Put the current library into ``target``, from ``cache`` if possible, else by a build. Return what was done."""
    build_dir.mkdir(parents=True, exist_ok=True)
    with (build_dir / ".lock").open("w") as lock:  # make serve and make test may be started at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_current(target):
            return "up to date"
        version = source_hash()
        kept = cache / f"{version}.so" if cache else None
        if kept and kept.is_file():
            done = "from the cache"
            replace(kept, target / LIBRARY)
        else:
            done = "built"
            staging = build_dir / "staging"
            build(build_dir, staging, jobs)
            if kept:
                _keep(staging / LIBRARY, kept)
            replace(staging / LIBRARY, target / LIBRARY)
        (target / BUILT_FROM).write_text(version)
        return done


def _keep(library: Path, kept: Path) -> None:
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace(library, kept)
    except OSError as error:  # not fatal: the cache only makes the next checkout faster
        print(f"the library is not kept in {kept.parent}: {error}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "native")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-cache", action="store_true", help="build it, and keep it only in the package")
    args = parser.parse_args(arguments)
    try:
        done = provide(args.build_dir, TARGET, args.jobs, None if args.no_cache else cache_folder())
    except BuildError as error:
        sys.exit(str(error))
    print(f"{TARGET / LIBRARY}: {done}")


if __name__ == "__main__":
    main()
