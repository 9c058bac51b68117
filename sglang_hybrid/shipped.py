"""Files that come with the package: every setting with its default, profiles, settings for disaggregation.

    python -m sglang_hybrid.shipped     # where they are

A wheel holds them in the package, a checkout beside it.
"""

from __future__ import annotations

from pathlib import Path

_IN_WHEELS = Path(__file__).resolve().parent / "configs"  # where setup.py puts them
CONFIGS = _IN_WHEELS if _IN_WHEELS.is_dir() else Path(__file__).resolve().parents[1] / "configs"
_SUFFIX = ".safetensors"


def profile_path(given: str) -> str:
    """The path of the shipped profile of that name. Everything else, a file in this directory too, stays as it is."""
    shipped = CONFIGS / "profiles" / (given.removesuffix(_SUFFIX) + _SUFFIX)
    if given == Path(given).name and not Path(given).exists() and shipped.is_file():
        return str(shipped)
    return given


def files() -> list[Path]:
    return sorted(path for path in CONFIGS.rglob("*") if path.suffix in (".yaml", _SUFFIX))


if __name__ == "__main__":
    print(*files(), sep="\n")
