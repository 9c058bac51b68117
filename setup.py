"""Builds the C++ library with the package and adds the files of SHIPPED; everything else is in pyproject.toml."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import build_native  # noqa: E402

# from the checkout into the package: CUDA kernels, which are compiled where they run, and settings that come with it
SHIPPED = {
    "kernels/cuda/include": "ops/cuda/kernels/cuda/include",
    "kernels/cuda/src": "ops/cuda/kernels/cuda/src",
    "kernels/cpu/include": "ops/cuda/kernels/cpu/include",
    "configs": "configs",
}


class BuildWithKernels(build_py):
    """Wheels and editable installations alike get the library from the package's directory."""

    def run(self) -> None:
        build_native.main([])
        super().run()
        if not self.editable_mode:  # which reads them in the checkout
            package = Path(self.build_lib) / "sglang_hybrid"
            for source, inside in SHIPPED.items():
                shutil.rmtree(package / inside, ignore_errors=True)
                shutil.copytree(ROOT / source, package / inside, ignore=shutil.ignore_patterns("*.png"))


class PlatformDistribution(Distribution):
    """A wheel with a compiled library is not for every platform, though no Python module is compiled."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels}, distclass=PlatformDistribution)
