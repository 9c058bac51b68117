"""Decoding while whole rows are in device memory, and the change to slots when they no longer fit."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import DEVICE
from test_gpu_scout import LAYERS, LENGTHS, Decoding

STEPS = 40 if DEVICE == "cuda" else 3


def check_exact(decoding: Decoding) -> None:
    for layer in range(LAYERS):
        expected = decoding.expected(layer, everything=True)
        torch.testing.assert_close(decoding.out[layer, :-1].cpu().float(), expected, rtol=2e-2, atol=2e-2)


def begin(decoding: Decoding) -> None:
    decoding.next_tokens()
    decoding.scout.dense.begin_step(decoding.query.shape[1], decoding.lengths.tolist())


# the slots of 6 rows hold 6 * slots blocks; at first 62 are needed
@pytest.mark.parametrize("recorded", [False, True] if DEVICE == "cuda" else [False])
def test_attention_is_exact_while_whole_rows_are_held(recorded: bool) -> None:
    decoding = Decoding(12, 0, slots=12)
    decoding.scout.reset_rows(decoding.rows)
    decoding.scout.hold_rows(whole=True)
    if recorded:
        decoding.scout.step.load_nothing()
        decoding.run(predicts=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoding.run(predicts=False)
    for _ in range(STEPS):
        begin(decoding)
        if recorded:
            graph.replay()
        else:
            decoding.run(predicts=False)
        torch.cuda.synchronize()
        check_exact(decoding)
    assert int(decoding.scout.refused) == 0


def test_rows_go_on_with_slots_and_come_back() -> None:
    decoding = Decoding(36, 4, slots=36)  # a budget above the context: both ways are exact
    decoding.scout.reset_rows(decoding.rows)
    for whole in (True, False, True, False):
        for step in range(2):
            decoding.next_tokens()
            if step == 0:
                decoding.scout.hold_rows(whole, count=decoding.query.shape[1])
                decoding.load_rows()
                torch.cuda.synchronize()
                if not whole:
                    decoding.check_digests(decoding.lengths - 1)
            if whole:
                decoding.scout.dense.begin_step(decoding.query.shape[1], decoding.lengths.tolist())
            decoding.run(predicts=False)
            torch.cuda.synchronize()
            check_exact(decoding)
            if not whole:
                decoding.check_slots()
    assert int(decoding.scout.refused) == 0


def test_a_row_that_begins_anew_is_loaded_anew() -> None:
    decoding = Decoding(12, 0, slots=12)
    decoding.scout.reset_rows(decoding.rows)
    decoding.scout.hold_rows(whole=True)
    begin(decoding)
    decoding.run(predicts=False)
    torch.cuda.synchronize()
    # a new request of the same length took the row: its blocks in the pool are different
    entry = 3
    row = list(LENGTHS)[entry]
    for part in (*decoding.keys, *decoding.values):
        part[decoding.pages[entry, :8]] = part[decoding.pages[entry, :8]].flip(0)
    decoding.scout.reset_rows(torch.tensor([row], device=DEVICE))
    begin(decoding)
    decoding.run(predicts=False)
    torch.cuda.synchronize()
    check_exact(decoding)


def test_a_row_that_joins_later_than_it_began_is_loaded() -> None:
    """The last row is reset together with the others, but is not a real row of the first step."""
    decoding = Decoding(12, 0, slots=12)
    decoding.scout.reset_rows(decoding.rows)
    decoding.scout.hold_rows(whole=True)
    count = decoding.query.shape[1]
    for waiting in (1, 0):
        decoding.next_tokens()
        torch.cuda.synchronize()
        decoding.scout.step.active_rows.fill_(len(LENGTHS) - waiting)
        decoding.scout.dense.begin_step(count, decoding.lengths[: len(LENGTHS) - waiting].tolist())
        if waiting:  # the last row decodes no token in this step; its tokens so far are in the pool
            decoding.lengths[-1] -= 1
        decoding.run(predicts=False)
        torch.cuda.synchronize()
    check_exact(decoding)
