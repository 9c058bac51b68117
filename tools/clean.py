#!/usr/bin/env python3
"""Remove what was made in this checkout, or with --cache what servers and set-up keep in the user's cache.

python3 tools/clean.py [--cache]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package may not be installed

from sglang_hybrid.user_cache import default_cache_dir  # noqa: E402

_MADE = (
    *(".venv", ".venv-*", "build", "dist", "*.egg-info", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"),
    *("sglang_hybrid/ops/cpu/*.so", "sglang_hybrid/ops/cpu/.built-from"),
)
_PACKAGES = ("sglang_hybrid", "cpu_worker", "bench", "tests", "tools")
_CACHED = ("models", "native", "cuda")  # no other files: the user may have chosen a directory that has other contents


def clean_checkout(root: Path = ROOT) -> None:
    remove(path for pattern in _MADE for path in sorted(root.glob(pattern)))
    for package in _PACKAGES:
        for bytecode in sorted((root / package).rglob("__pycache__")):
            shutil.rmtree(bytecode)


def clean_cache(cache: Path) -> None:
    remove(cache / name for name in _CACHED if (cache / name).is_dir())


def remove(paths: Iterable[Path]) -> None:
    removed = False
    for path in paths:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        print(f"removed {path}", flush=True)
        removed = True
    if not removed:
        print("there was nothing to remove")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", action="store_true", help="the user's cache instead of the checkout")
    if parser.parse_args().cache:
        clean_cache(default_cache_dir())
    else:
        clean_checkout()
        print(f"kept: converted models and compiled kernels in {default_cache_dir()} (make clean-cache)")


if __name__ == "__main__":
    main()
