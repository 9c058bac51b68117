"""Builds the C++ library with the package and adds the CUDA sources; everything else is in pyproject.toml."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import build_native  # noqa: E402

# CUDA kernels are compiled where they run, for the GPU that is there
CUDA_SOURCES = ("cuda/include", "cuda/src", "cpu/include")


class BuildWithKernels(build_py):
    """Wheels and editable installations alike get the library from the package's directory."""

    def run(self) -> None:
        build_native.main([])
        super().run()
        if not self.editable_mode:  # which reads them in the checkout
            target = Path(self.build_lib) / "sglang_hybrid" / "cuda" / "kernels"
            shutil.rmtree(target, ignore_errors=True)
            for folder in CUDA_SOURCES:
                shutil.copytree(ROOT / "kernels" / folder, target / folder)


class PlatformDistribution(Distribution):
    """A wheel with a compiled library is not for every platform, though no Python module is compiled."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels}, distclass=PlatformDistribution)
