#!/usr/bin/env python3
"""Compile the modules that a server imports, with all cores. Runs in the environment's own Python.

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

# Large, and a server imports little or nothing of it: half of the time would go there.
_LEFT_OUT = re.compile(
    r"tests?/|.*/tests?/|.*/testing/"
    r"|(datasets|fontTools|mypyc?|pandas|pip|pyarrow|pygments/lexers|setuptools)/"
    r"|sglang/(multimodal_gen|test)/|transformers/models/(?!auto/).*/|sympy/(combinatorics|parsing|physics|stats)/"
)
_CHUNK = 32  # files; one at a time spends more on messages between processes than on small files


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
    """Whether Python would take the bytecode that is there: its header names the source's time and size."""
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
            continue  # templates and Python 2 are in some packages; nobody imports them
    return compiled


if __name__ == "__main__":
    main()
