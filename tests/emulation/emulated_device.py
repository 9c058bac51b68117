"""Pytest plugin that runs tests of CUDA kernels without a GPU, on CPU tensors and the library of ``kernels_on_cpu``.

    KERNELS_ON_CPU=library.so PYTHONPATH=tests/emulation:tests/gpu python -m pytest -p emulated_device --noconftest \\
        tests/gpu/test_cuda_scoring.py

The plugin replaces CUDA in the tests and in ``sglang_hybrid.ops.cuda``: launches, checks of the device, registered
host memory, streams, and graphs, which become lists of launches.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sglang_hybrid.ops.cuda import (
    attention,
    copies,
    digests,
    host_memory,
    kept_tokens,
    key_codes,
    mailbox,
    missed,
    new_keys,
    partial_keys,
    predictor,
    salience,
    scoring,
    selection,
    speculation,
    step,
    weights,
    whole_requests,
)
from sglang_hybrid.ops.cuda.structs import KernelStruct, struct
from sglang_hybrid.protocol.region import SharedRegion

PART = "EMULATED_PART"  # environment variable; "1/3" runs the second third of the tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, parts = map(int, os.environ.get(PART, "0/1").split("/"))
    kept = items[number::parts]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


_library = ctypes.CDLL(os.environ["KERNELS_ON_CPU"])
_library.sh_cuda_mailbox_attach.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p]


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


def launch(name: str, **fields: Any) -> KernelStruct:
    function, arguments = getattr(_library, f"sh_cuda_{name}"), struct(name, **fields)

    def work() -> None:
        assert function(ctypes.byref(arguments), None) == 0

    run(work)
    return arguments


def checked(function: Any, *arguments: Any) -> None:
    assert function(*arguments) == 0


class Stream:
    """Stream on which work runs at once, so waits do nothing. ``emulated_streams`` has streams with queues."""

    cuda_stream = None

    def __init__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_event(self, _event: object) -> None:
        pass

    def wait_stream(self, _stream: object) -> None:
        pass

    def record_event(self) -> object:
        return object()


def address(name: str, tensor: torch.Tensor | None, dtype: Any, shape: tuple[int, ...]) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype in (dtype if isinstance(dtype, tuple) else (dtype,)), name
    assert tuple(tensor.shape) == tuple(shape) and tensor.is_contiguous(), name
    return tensor.data_ptr()


class HostMemory(host_memory.RegisteredRegion):
    """Host region without registration: the emulated device reads host addresses."""

    def __init__(self, region: SharedRegion) -> None:
        self._region = self.region = region
        self._start = self.device_address = region.address

    def close(self) -> None:
        pass


_LAUNCHING = (
    attention, copies, digests, kept_tokens, key_codes, mailbox, missed, new_keys, partial_keys, predictor, salience,
    scoring, selection, speculation, step, weights, whole_requests,
)  # fmt: skip
for _module in _LAUNCHING:
    _module.launch, _module.address = launch, address
for _module in (attention, mailbox):
    _module.checked, _module.library = checked, lambda: _library
for _module in (step, digests, scoring, predictor, attention, kept_tokens, mailbox, missed, salience, speculation):
    _module.active_address = lambda active: None if active is None else active.data_ptr()
digests.RegisteredRegion = mailbox.RegisteredRegion = host_memory.RegisteredRegion = HostMemory
torch.Tensor.is_cuda = property(lambda _: True)
torch.cuda.synchronize = lambda *_: None
torch.cuda.current_stream = torch.cuda.Stream = Stream
torch.cuda.stream = contextlib.nullcontext
torch.cuda.CUDAGraph, torch.cuda.graph = Graph, capture
