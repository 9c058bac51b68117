"""Long rows in their first decode steps attend to everything: how a step is split into these rows and the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_hybrid.engines.base import StepBatch
from sglang_hybrid.engines.first_steps import PATIENCE, FirstSteps, SplitStep


def step(rows: list[int], lengths: list[int], padding: int = 0) -> StepBatch:
    of_rows, of_lengths = torch.tensor(rows), torch.tensor(lengths)
    return StepBatch(of_rows, of_lengths, of_lengths, of_rows * 100, padding)


def taken(steps: FirstSteps, batch: StepBatch, longer_than: int = 64) -> tuple[list[int], list[int]] | None:
    split = steps.take(batch, longer_than)
    return None if split is None else (split.first, split.others)


def test_a_long_row_is_taken_in_its_first_steps() -> None:
    steps = FirstSteps()
    steps.begin(torch.tensor([3, 5]), steps=2)
    assert taken(steps, step([7, 3, 5], [90, 65, 64])) == ([1], [0, 2])
    assert taken(steps, step([7, 3, 5], [91, 66, 65])) == ([1, 2], [0])  # row 5 has become long
    assert not steps.any_waits
    assert taken(steps, step([7, 3, 5], [92, 67, 66])) is None


def test_rows_that_are_not_in_the_step_go_on_waiting() -> None:
    """For example, a row waits while its prompt is computed in chunks, between which other rows decode."""
    steps = FirstSteps()
    steps.begin(torch.tensor([3]), steps=1)
    assert taken(steps, step([1], [90])) is None
    assert steps.any_waits
    assert taken(steps, step([1, 3], [91, 90])) == ([1], [0])


def test_nobody_is_waited_for_forever() -> None:
    """A request that ends with its prompt never decodes, and a request that ends with its first token decodes once."""
    steps = FirstSteps()
    steps.begin(torch.tensor([3]), steps=2)
    assert taken(steps, step([3], [90])) == ([0], [])
    for _ in range(PATIENCE):
        assert steps.any_waits
        assert taken(steps, step([1], [90])) is None
    assert not steps.any_waits


def test_padding_is_nobodys_first_step() -> None:
    steps = FirstSteps()
    steps.begin(torch.tensor([0]), steps=1)
    assert taken(steps, step([4, 0], [90, 90], padding=1)) is None
    assert steps.any_waits


def test_a_row_that_begins_anew_is_taken_again() -> None:
    steps = FirstSteps()
    for _ in range(2):
        steps.begin(torch.tensor([2]), steps=2)
        assert taken(steps, step([2], [90])) == ([0], [])


class Engine:
    """An engine that records its batches, and marks the outputs of prefill and of decode."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def begin_step(self, batch: Any) -> None:
        self.calls.append(("step", batch.rows.tolist(), batch.lengths_on_host.tolist(), batch.slots.tolist()))

    def begin_prefill(self, batch: Any) -> None:
        self.calls.append(("prefill", batch.rows.tolist(), batch.lengths, batch.new_tokens, batch.slots.tolist()))

    def prefill(self, layer: int, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query + 1000

    def decode(self, layer: int, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query + 2000


def test_each_row_goes_its_way_and_comes_back_to_its_place() -> None:
    engine: Any = Engine()
    split = SplitStep(step([7, 3, 5], [90, 65, 80]), first=[1], others=[0, 2])
    split.begin(engine)
    assert engine.calls == [
        ("step", [7, 5], [90, 80], [700, 500]),
        ("prefill", [3], [65], [1], [300]),
    ]
    query = torch.arange(3.0)[:, None, None].expand(3, 4, 8)
    out = split.attend(engine, 0, query, query[:, :2], query[:, :2], 1.0)
    assert out[:, 0, 0].tolist() == [2000, 1001, 2002]
    assert split.of_others(torch.arange(3)).tolist() == [0, 2]


def test_a_step_of_first_ones_alone_decodes_nothing() -> None:
    engine: Any = Engine()
    engine.decode = lambda *_: pytest.fail("nobody is left")
    split = SplitStep(step([3], [65]), first=[0], others=[])
    split.begin(engine)
    query = torch.zeros(1, 4, 8)
    assert split.attend(engine, 0, query, query[:, :2], query[:, :2], 1.0).shape == (1, 4, 8)
