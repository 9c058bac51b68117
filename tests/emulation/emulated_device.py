"""A pytest plugin that runs tests of CUDA kernels without a GPU, on CPU tensors and the library of ``kernels_on_cpu``.

    KERNELS_ON_CPU=library.so PYTHONPATH=tests/emulation:tests/gpu python -m pytest -p emulated_device --noconftest \\
        tests/gpu/test_cuda_scoring.py

What is CUDA's in the tests and in ``sglang_hybrid.cuda`` is replaced: launches, checks of the device, host memory that
is registered, gathering, and graphs, which become lists of launches.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import selection_cases
import torch

from sglang_hybrid.cuda import digests, gathering, scoring, selection, selection_structs

_library = ctypes.CDLL(os.environ["KERNELS_ON_CPU"])
for _name, _struct in selection_structs.BY_NAME.items():
    getattr(_library, _name.replace("sh_", "sh_cuda_")).argtypes = [ctypes.POINTER(_struct), ctypes.c_void_p]


class Graph:
    capturing: Graph | None = None

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []

    def replay(self) -> None:
        for launch in self.launches:
            launch()


@contextlib.contextmanager
def capture(graph: Graph) -> Iterator[None]:
    Graph.capturing = graph
    yield
    Graph.capturing = None


def run(work: Callable[[], None]) -> None:
    if Graph.capturing:
        Graph.capturing.launches.append(work)
    else:
        work()


def launch(function: Any, arguments: ctypes.Structure) -> None:
    def work() -> None:
        assert function(ctypes.byref(arguments), None) == 0

    run(work)


def address(name: str, tensor: torch.Tensor | None, dtype: Any, shape: tuple[int, ...]) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype in (dtype if isinstance(dtype, tuple) else (dtype,)), name
    assert tuple(tensor.shape) == tuple(shape) and tensor.is_contiguous(), name
    return tensor.data_ptr()


class HostMemory:
    """In place of RegisteredRegion."""

    def __init__(self, region: object) -> None:
        self.region = region

    def address_of(self, name: str, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()


def gather_blocks(
    region: object, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, key_slots: torch.Tensor,
    value_slots: torch.Tensor, *, destinations: torch.Tensor, count: torch.Tensor,
) -> None:  # fmt: skip
    heads, slots = key_slots.shape[1:3]

    def work() -> None:
        listed = slice(0, int(count))
        for page, slot in zip(pages[listed].tolist(), destinations[listed].tolist(), strict=True):
            head = slot // slots % heads
            key_slots.flatten(0, 2)[slot], value_slots.flatten(0, 2)[slot] = keys[page, head], values[page, head]

    run(work)


for _module in (digests, scoring, selection):
    _module.launch, _module.library, _module.address = launch, lambda: _library, address
for _module in (digests, scoring):
    _module.active_address = lambda active: None if active is None else active.data_ptr()
digests.RegisteredRegion = HostMemory
gathering.gather_blocks = gather_blocks
selection_cases.DEVICE = "cpu"
torch.Tensor.is_cuda = property(lambda _: True)
torch.cuda.synchronize = lambda *_: None
torch.cuda.CUDAGraph, torch.cuda.graph = Graph, capture
