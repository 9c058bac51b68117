"""Code that runs at every interpreter start of a CPU environment, through a ``.pth`` line.

This code must stay cheap and must never fail: it imports nothing heavy and only registers
finders, which act when SGLang imports ``sgl_kernel`` or ``torchvision``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_KERNELS = "sgl_kernel"


class _StandInLoader(importlib.abc.Loader):
    """Loads ``sgl_kernel`` as our stand-in. Its submodules stay missing: SGLang guards those imports."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return importlib.import_module("sglang_hybrid.integration.cpu_host.kernel_stand_in")

    def exec_module(self, module: ModuleType) -> None:
        pass  # importing it ran it


class _KernelFinder(importlib.abc.MetaPathFinder):
    """Finds our stand-in for ``sgl_kernel``. It is the last finder, so that a real ``sgl_kernel`` always wins."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == _KERNELS:
            return importlib.machinery.ModuleSpec(name, _StandInLoader(), is_package=True)
        return None


class _TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Declares torchvision's operator schemas just before torchvision is imported.

    torchvision's C++ extension cannot load beside a CPU torch, and its Python part only
    needs the operators to exist, not to run.
    """

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            importlib.import_module("sglang_hybrid.integration.cpu_host.torchvision_ops")


def run() -> None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # OpenMP threads that spin while they wait take the cores of what they wait for: the CPU worker, another server.
    # Seen on two cores that other programs kept busy (load 4 to 6), one run each: 40 decode steps of four rows in 74 s,
    # and in 9 s like this.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # oneDNN would leave a /tmp/perf-PID.map behind for every process that multiplied matrices
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
    if not any(isinstance(finder, _KernelFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())
        sys.meta_path.append(_KernelFinder())
