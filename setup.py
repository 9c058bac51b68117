"""Builds the C++ library with the package, adds SHIPPED, and tags wheels; the rest is in pyproject.toml."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import build_native  # noqa: E402

# From the checkout into the package. CUDA kernels are compiled where they run; CPU kernels are compiled where the
# library in the wheel does not load.
SHIPPED = ("kernels", "configs")
NOT_SHIPPED = ("*.png", "tests", "__pycache__")


class BuildWithKernels(build_py):
    """Wheels and editable installations alike get the library from the package's directory."""

    def run(self) -> None:
        build_native.main([])
        super().run()
        if not self.editable_mode:  # which reads them in the checkout
            package = Path(self.build_lib) / "sglang_hybrid"
            for folder in SHIPPED:
                shutil.rmtree(package / folder, ignore_errors=True)
                shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns(*NOT_SHIPPED))


class PlatformDistribution(Distribution):
    """A wheel with a compiled library is not for every platform, though no Python module is compiled."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """The library is loaded by ctypes, so one wheel is for every Python of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=PlatformDistribution)
