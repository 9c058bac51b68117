"""Readings of engines: slots in device memory, misses by path, hits and waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.core import BlockList
from sglang_hybrid.engines.base import Engine
from sglang_hybrid.engines.cuda.engine import CudaEngine
from sglang_hybrid.metrics.readings import Readings
from sglang_hybrid.metrics.waits import StepWaits
from sglang_hybrid.worker.torch_attention import TorchMisses


class Silent(Engine):
    """An engine without readings, like the native CPU engine."""

    name = "silent"
    use = begin_prefill = prefill = begin_step = decode = reset_rows = lambda *_: None  # type: ignore[assignment]


def cuda_engine(
    pages: int, lengths: list[int], *, is_dense: bool, may_hold: bool = True, per_row: int | None = None
) -> Any:
    """Return an engine with slots for four rows, made without a device.

    ``pages``: blocks of whole requests; ``per_row``: slots of a row, if not a quarter of them.
    """
    engine: Any = CudaEngine.__new__(CudaEngine)
    engine.watch, engine._lengths = None, lengths
    engine._shape = SimpleNamespace(rows=4)
    engine.program = SimpleNamespace(
        dense=SimpleNamespace(pages=pages), is_dense=is_dense, blocks_per_row=per_row or pages // 4
    )
    engine._whole_requests = object() if may_hold else None
    return engine


def test_an_engine_that_counts_nothing_tells_nothing() -> None:
    assert Silent().readings() == Readings() and Silent().describe_worker() is None


def test_a_row_can_fill_its_own_slots_and_no_others() -> None:
    read = cuda_engine(40, [64, 33, 5000], is_dense=False).readings()
    assert (read.slots, read.slots_used, read.holds_whole_requests) == (40, 2 + 2 + 10, False)


def test_slots_of_codes_are_more_than_the_blocks_of_whole_requests_in_the_same_memory() -> None:
    read = cuda_engine(20, [64, 33, 5000], is_dense=False, per_row=10).readings()
    assert (read.slots, read.slots_used) == (40, 2 + 2 + 10)
    whole = cuda_engine(20, [64, 33, 16 * 32], is_dense=True, per_row=10).readings()
    assert (whole.slots, whole.slots_used) == (20, 2 + 2 + 16)


def test_whole_requests_share_the_memory_of_all_slots() -> None:
    read = cuda_engine(40, [64, 33, 20 * 32], is_dense=True).readings()
    assert (read.slots, read.slots_used, read.holds_whole_requests) == (40, 24, True)


def test_without_memory_for_blocks_there_are_no_slots_to_tell_of() -> None:
    read = cuda_engine(0, [64], is_dense=False, may_hold=False).readings()
    assert read.slots is None and read.holds_whole_requests is None
    assert cuda_engine(8, [64], is_dense=False, may_hold=False).readings().holds_whole_requests is None


def test_a_step_waits_for_all_its_layers_and_is_counted_when_the_next_one_waits() -> None:
    waits = StepWaits()
    for step, seconds in ((1, 0.001), (1, 0.002), (2, 0.5), (4, 0.0)):
        waits.add(step, seconds)
    assert sum(waits.distribution.counts) == 2
    assert waits.distribution.total == pytest.approx(0.503)
    assert waits.distribution.counts[-1] == 1  # above the last bound


def test_misses_that_torch_attends_to_are_of_this_process() -> None:
    misses = TorchMisses()
    assert misses.served.by_path == {} and misses.waits is None and misses.describe_worker() is None
    keys = torch.randn(4, 1, 32, 8)
    cache: Any = SimpleNamespace(keys=keys, values=keys)
    ids = torch.tensor([[[0, 2, -1]], [[3, -1, -1]]])
    misses.post(torch.randn(2, 1, 8), cache, BlockList(ids, torch.where(ids >= 0, 32, 0)), 1.0, 1)
    assert misses.served.by_path == {"process": 3}
