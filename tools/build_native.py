#!/usr/bin/env python3
"""Build the CPU kernels and the worker engine with CMake, into the package.

    python3 tools/build_native.py [--build-dir build/native] [--jobs N]

Needs CMake 3.22 and a C++20 compiler. Installing the package does the same (setup.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "kernels" / "cpu"
TARGET = ROOT / "sglang_hybrid" / "native"


def build(build_dir: Path, target: Path, jobs: int, *definitions: str) -> None:
    """Configure, build and install. ``definitions`` are CMake's -D settings."""
    # the CMake of the environment that runs this, if it has one, before the machine's
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    configure = ["cmake", "-S", str(SOURCE), "-B", str(build_dir), "-DCMAKE_BUILD_TYPE=Release"]
    for command in (
        [*configure, *(f"-D{definition}" for definition in definitions)],
        ["cmake", "--build", str(build_dir), "--parallel", str(jobs)],
        ["cmake", "--install", str(build_dir), "--prefix", str(target)],
    ):
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout[-4000:]}\nfailed with status {done.returncode}: {' '.join(command)}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "native")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(arguments)
    build(args.build_dir, TARGET, args.jobs)
    print(f"built {TARGET / 'libsglang_hybrid_cpu.so'}")


if __name__ == "__main__":
    main()
