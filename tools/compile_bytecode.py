#!/usr/bin/env python3
"""Compile the modules that a server imports to bytecode, on all cores. The environment's own Python runs this script.

    .venv/bin/python tools/compile_bytecode.py

uv installs sources only. A server that finds no bytecode compiles thousands of modules in one thread, and does so at
every start where PYTHONDONTWRITEBYTECODE is set, as it is in many containers.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import py_compile
import re
import struct
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

# Large packages of which a server imports little or nothing: they would take half of the time.
_LEFT_OUT = re.compile(
    r"tests?/|.*/tests?/|.*/testing/"
    r"|(datasets|fontTools|mypyc?|pandas|pip|pyarrow|pygments/lexers|setuptools)/"
    r"|sglang/(multimodal_gen|test)/|transformers/models/(?!auto/).*/|sympy/(combinatorics|parsing|physics|stats)/"
)
_CHUNK = 32  # files per task; with one file per task, messages between processes would take longer than small files


def main() -> None:
    packages = Path(sysconfig.get_path("purelib"))
    waiting = [path for path in sources(packages) if not is_compiled(path)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), initializer=gc.disable) as pool:
        compiled = sum(pool.map(compile_files, [waiting[i : i + _CHUNK] for i in range(0, len(waiting), _CHUNK)]))
    print(f"{compiled} modules")


def sources(packages: Path) -> list[str]:
    found = []
    for folder, _, files in os.walk(packages):
        inside = os.path.relpath(folder, packages) + "/"
        if not _LEFT_OUT.match(inside):
            found += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    return found


def is_compiled(source: str) -> bool:
    """Return True if Python would use the existing bytecode: its header must have the source's time and size."""
    try:
        with open(importlib.util.cache_from_source(source), "rb") as file:
            magic, flags, seconds, size = struct.unpack("<4sIII", file.read(16))
        now = os.stat(source)
    except (OSError, struct.error):
        return False
    wanted = (importlib.util.MAGIC_NUMBER, 0, int(now.st_mtime) & 0xFFFFFFFF, now.st_size & 0xFFFFFFFF)
    return (magic, flags, seconds, size) == wanted


def compile_files(files: list[str]) -> int:
    compiled = 0
    for file in files:
        try:
            compiled += py_compile.compile(file, quiet=2) is not None
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # some packages contain templates and Python 2, which are never imported
    return compiled


if __name__ == "__main__":
    main()
