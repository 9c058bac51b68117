"""Compile the CUDA kernels for the CPU. ``cuda_on_cpu.h`` describes the emulation and its limits.

Two rules translate the sources: one for launches and one for dynamic shared memory. Headers that contain PTX are
replaced by those in ``include``. The emulation shows neither the speed nor the memory model of a GPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
UNITS = (
    "dense",
    "digests",
    "scoring",
    "scoring_bf16",
    "scoring_fp16",
    "selection",
    "shift",
    "predict",
    "attention",
    "missed",
    "mailbox",
    "prefill",
    "salience",
    "speculation",
    "weights",
    "kept_tokens",
)
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", "-U_FORTIFY_SOURCE", "-ffp-contract=off")

_LAUNCH = re.compile(r"(\w+)<<<(.*?), stream>>>\((.*?)\);")
_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


def translated(source: str) -> str:
    source = _SHARED.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulated::dynamic_shared());", source)
    # an emulated launch is finished when it returns, so memory that its arguments point to is still alive
    source = _LAUNCH.sub(
        r"{ const auto launched = \1; emulated::launch(\2, [=] { launched(\3); }); }",
        source,
    )
    return source.replace("#include <cuda_runtime.h>", '#include "cuda_on_cpu.h"')


def source_hash() -> str:
    """Return twelve hexadecimal digits: the hash of all sources and compiler flags."""
    digest = hashlib.sha256(" ".join((*FLAGS, *UNITS)).encode())
    folders = (HERE, KERNELS / "cuda", KERNELS / "cpu" / "include")
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
        if "__pycache__" not in path.parts:
            digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def built(cache: Path, compiler: str = "c++") -> Path:
    """Return the library's path in ``cache``; compile it if no library of these sources exists.

    A lock makes processes that call at the same time take turns.
    """
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"{source_hash()}.so"
    with (cache / f".{library.stem}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=cache) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            compiled(Path(folder), compiler).rename(library)
    return library


def compiled(folder: Path, compiler: str) -> Path:
    """Compile the library in ``folder`` and return its path."""
    shadowed = {path.name for path in (HERE / "include").rglob("*.cuh")}
    for kind in ("src", "include/sglang_hybrid/cuda"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for path in (KERNELS / "cuda" / kind).iterdir():
            if path.is_file() and path.name not in shadowed:
                (folder / kind / path.name).write_text(translated(path.read_text()))
    includes = (HERE, HERE / "include", folder / "include", KERNELS / "cpu" / "include")
    sources = [HERE / "cuda_on_cpu.cpp", *(folder / "src" / f"{unit}.cu" for unit in UNITS)]

    def compile_one(source: Path) -> str:
        made = folder / f"{source.stem}.o"
        command = [compiler, *FLAGS, *(f"-I{path}" for path in includes), "-include", "cuda_on_cpu.h"]
        subprocess.run([*command, "-x", "c++", "-c", str(source), "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, sources))
    library = folder / "kernels_on_cpu.so"
    subprocess.run([compiler, "-shared", *objects, "-o", str(library)], check=True)
    return library
