"""Decoding with larger budgets while few rows run, and going from one budget to another."""

from __future__ import annotations

import pytest
import torch
from selection_cases import DEVICE
from test_gpu_scout import LAYERS, Decoding

STEPS = 40 if DEVICE == "cuda" else 3


def check(decoding: Decoding, first: bool) -> None:
    """In a first step everything is a miss at first, and then resident."""
    decoding.check_slots()
    for layer in range(0 if first else LAYERS):
        expected = decoding.expected(layer, everything=False)
        torch.testing.assert_close(decoding.out[layer, :-1].cpu().float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("recorded", [False, True] if DEVICE == "cuda" else [False])
@pytest.mark.parametrize(("worker", "share"), [(False, 0.0), (True, 0.4)])
@pytest.mark.parametrize("predicts", [False, True])
def test_rows_have_twice_the_budget_in_the_memory_of_two(
    predicts: bool, worker: bool, share: float, recorded: bool
) -> None:
    decoding = Decoding(7, 0, None, worker, share, levels=2)
    scout = decoding.scout
    scout.rows_begin(decoding.rows)
    scout.hold_rows(whole=False, level=1)
    assert (scout.budget.blocks, scout.budget.rows) == (14, 4)
    with decoding.engine():
        if recorded:
            scout.step.load_nothing()
            decoding.run(predicts)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                decoding.run(predicts)
        for step in range(STEPS):
            decoding.next_tokens()
            if recorded:
                graph.replay()
            else:
                decoding.run(predicts)
            torch.cuda.synchronize()
            check(decoding, first=step == 0)
    held = (decoding.held(0) >= 0).sum(dim=2)
    assert (held[[0, 3]] == 14).all(), "the first step loads as much as a long row may have"
    assert int(scout.refused) == 0


def test_budgets_shrink_and_grow() -> None:
    decoding = Decoding(7, 0, levels=2)
    decoding.scout.rows_begin(decoding.rows)
    for level in (1, 0, 1, 0):
        for step in range(2):
            decoding.next_tokens()
            if step == 0:
                torch.cuda.synchronize()  # the emulation puts off kernels, but not what torch does
                decoding.scout.hold_rows(whole=False, level=level, count=decoding.query.shape[1])
                decoding.load_rows()
            decoding.run(predicts=True)
            torch.cuda.synchronize()
            check(decoding, first=step == 0)
        assert ((decoding.held(0) >= 0).sum(dim=2)[[0, 3]] == 7 << level).all()
    assert int(decoding.scout.refused) == 0


def test_a_row_that_begins_anew_has_nothing_of_the_request_before() -> None:
    decoding = Decoding(7, 0, levels=2)
    decoding.scout.rows_begin(decoding.rows)
    decoding.scout.hold_rows(whole=False, level=1)
    for _ in range(2):
        decoding.next_tokens()
        decoding.run(predicts=False)
        torch.cuda.synchronize()
    for part in (*decoding.keys, *decoding.values):
        part[decoding.pages[0, :12]] = part[decoding.pages[0, :12]].flip(0)
    decoding.scout.rows_begin(decoding.rows[:1])
    decoding.next_tokens()
    decoding.run(predicts=False)
    torch.cuda.synchronize()
    decoding.check_slots()
