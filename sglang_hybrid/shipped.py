"""Files that come with the package: all settings with their defaults, profiles, settings for disaggregation.

    python -m sglang_hybrid.shipped     # where they are

A wheel has these files inside the package, a checkout has them beside the package.
"""

from __future__ import annotations

from pathlib import Path

_IN_WHEELS = Path(__file__).resolve().parent / "configs"  # where setup.py puts the files
CONFIGS = _IN_WHEELS if _IN_WHEELS.is_dir() else Path(__file__).resolve().parents[1] / "configs"
_SUFFIX = ".safetensors"


def profile_path(given: str) -> str:
    """Return the path of the shipped profile named ``given``. Return ``given`` if no profile has this name.

    A file ``given`` in the current directory is used rather than a shipped profile.
    """
    shipped = CONFIGS / "profiles" / (given.removesuffix(_SUFFIX) + _SUFFIX)
    if given == Path(given).name and not Path(given).exists() and shipped.is_file():
        return str(shipped)
    return given


def files() -> list[Path]:
    return sorted(path for path in CONFIGS.rglob("*") if path.suffix in (".yaml", _SUFFIX))


if __name__ == "__main__":
    print(*files(), sep="\n")
