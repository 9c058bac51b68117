"""Scores of blocks and the shift of an LSE on the GPU, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_cases import DEVICE, seeded
from selection_cases import LayerCase, Shape, numbers, random_layer, summaries

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.digests import SlotTable
from sglang_hybrid.ops.cuda.scoring import ScoreWorkspace, score_blocks, shift_lse
from sglang_hybrid.ops.cuda.selection import Misses, select_blocks

UNTOUCHED = 77.0
TOLERANCE = 0.02  # in attention logits; the kernel keeps the steps of codes in float16

SHAPES = [
    Shape(batch=1, heads=1, group=1, dim=64, channels=32, max_blocks=1),
    Shape(batch=1, heads=2, group=5, dim=128, channels=32, max_blocks=37),
    Shape(batch=4, heads=2, group=5, dim=128, channels=32, max_blocks=64),
    Shape(batch=3, heads=1, group=8, dim=128, channels=64, max_blocks=20),
    Shape(batch=3, heads=2, group=16, dim=64, channels=32, max_blocks=33, dtype=torch.float16),
    Shape(batch=2, heads=2, group=12, dim=128, channels=64, max_blocks=9),
    Shape(batch=5, heads=2, group=7, dim=128, channels=0, max_blocks=26),
    Shape(batch=2, heads=1, group=3, dim=64, channels=0, max_blocks=50, dtype=torch.float16),
    Shape(batch=2, heads=2, group=10, dim=128, channels=0, max_blocks=18),
    Shape(batch=2, heads=2, group=4, dim=64, channels=64, max_blocks=30),
    Shape(batch=1, heads=1, group=1, dim=64, channels=32, max_blocks=1, compact=True),
    Shape(batch=4, heads=2, group=5, dim=128, channels=32, max_blocks=64, compact=True),
    Shape(batch=3, heads=2, group=16, dim=64, channels=32, max_blocks=33, dtype=torch.float16, compact=True),
    Shape(batch=2, heads=2, group=12, dim=128, channels=64, max_blocks=9, compact=True),
    Shape(batch=2, heads=1, group=7, dim=64, channels=64, max_blocks=21, compact=True),
]
LARGE = Shape(batch=33, heads=4, group=5, dim=128, channels=32, max_blocks=120)


def scored(case: LayerCase, *, by_row: bool = False, query_by_row: bool = False) -> torch.Tensor:
    """Score the blocks and return the scores that selection writes; the selected blocks do not matter."""
    shape, query = case.shape, case.query
    if query_by_row:
        query = torch.full((shape.rows, *query.shape[1:]), torch.nan, dtype=query.dtype, device=DEVICE)
        query[case.step.row_of.long()] = case.query
    workspace = ScoreWorkspace(shape.batch, shape.heads, shape.group, shape.max_blocks, DEVICE)
    owners = shape.rows if by_row else shape.batch
    scores = torch.full((owners, shape.heads, shape.max_blocks), UNTOUCHED, device=DEVICE)
    put_off = score_blocks(
        query, case.digests, case.step, shape.scale, workspace, scores, by_row=by_row, query_by_row=query_by_row
    )
    assert (scores == UNTOUCHED).all()
    table = SlotTable(torch.full((shape.rows, shape.heads, 1), -1, dtype=torch.int32, device=DEVICE), 0, 0)
    misses = Misses(shape.batch, shape.heads, 1, DEVICE)
    pages = case.keys.shape[0]
    select_blocks(scores, table, case.step, 1, misses, pool_pages=pages, put_off=put_off, by_row=by_row)
    return scores


def assert_scores(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=1e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_are_scored_as_the_reference_does(shape: Shape) -> None:
    for seed in range(3):
        case = random_layer(shape, seed)
        assert_scores(scored(case), case.expected_scores())


def test_many_rows_of_very_different_lengths_are_scored() -> None:
    lengths = [1, 32, 33, 3840, 3839, 2000] + [64 * (i + 1) for i in range(27)]
    case = random_layer(LARGE, 3, lengths)
    assert_scores(scored(case), case.expected_scores())


@pytest.mark.parametrize("shape", [SHAPES[i] for i in (2, 5, 8, 13)], ids=str)
def test_queries_may_be_where_their_rows_are(shape: Shape) -> None:
    case = random_layer(shape, 2)
    assert torch.equal(scored(case, by_row=True, query_by_row=True), scored(case, by_row=True))


def test_scores_by_row_are_where_their_rows_are() -> None:
    """One row has more blocks than a CTA that writes scores has threads."""
    case = random_layer(Shape(batch=4, heads=2, group=5, dim=64, channels=32, max_blocks=300), 4)
    found, rows = scored(case, by_row=True), case.step.row_of.long()
    assert_scores(found[rows], case.expected_scores())
    others = torch.ones(case.shape.rows, dtype=torch.bool, device=DEVICE).index_fill(0, rows, False)
    assert others.any() and (found[others] == UNTOUCHED).all()


def test_estimates_are_more_exact_than_the_tolerance_on_average() -> None:
    case = random_layer(Shape(batch=2, heads=2, group=5, dim=128, channels=32, max_blocks=40), 5)
    found, expected = scored(case), case.expected_scores()
    there = expected > -torch.inf
    assert float((found - expected)[there].abs().mean()) < TOLERANCE / 8


@pytest.mark.parametrize("channels", [0, 32])
@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
def test_a_damaged_page_neither_wins_nor_poisons_the_others(channels: int, damage: float) -> None:
    shape = Shape(batch=2, heads=2, group=5, dim=128, channels=channels, max_blocks=30)
    case = random_layer(shape, 7, [30 * 32, 20 * 32])
    for block, channel in ((0, 3), (11, 127), (29, 64)):
        case.digests.digests[int(case.step.page_table[0, block]), :, 0, channel] = damage
    found = scored(case)
    assert_scores(found, case.expected_scores())
    worst = torch.finfo(torch.float32).min
    assert (found[0][:, [0, 11, 29]] == worst).all()
    assert (found[0][:, 1:11] > -1e6).all()


@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
def test_a_damaged_page_with_a_compact_digest_neither_wins_nor_poisons_the_others(damage: float) -> None:
    shape = Shape(batch=1, heads=2, group=5, dim=128, channels=32, max_blocks=30, compact=True)
    case = random_layer(shape, 7, [30 * 32])
    for block, channel in ((0, 3), (11, 127), (29, 64)):
        case.keys[int(case.step.page_table[0, block]), :, 5, channel] = damage
    case = replace(case, digests=summaries(case.keys.cpu(), shape, 7))
    found = scored(case)
    assert_scores(found, case.expected_scores())
    assert (found[0][:, [0, 11, 29]] == torch.finfo(torch.float32).min).all()
    assert (found[0][:, 1:11] > -1e6).all()


def test_large_channels_cost_compact_digests_little() -> None:
    shape = Shape(batch=1, heads=2, group=5, dim=128, channels=32, max_blocks=60, compact=True)
    case = random_layer(shape, 4, [60 * 32])
    case.keys[..., 77] += 50
    case = replace(case, digests=summaries(case.keys.cpu(), shape, 4))
    assert_scores(scored(case), case.expected_scores())
    whole = replace(case, digests=summaries(case.keys.cpu(), replace(shape, compact=False), 4))
    error = (case.expected_scores() - whole.expected_scores()).std()
    assert float(error) < 0.05 * float(whole.expected_scores().std())


@pytest.mark.parametrize("compact", [False, True])
def test_tokens_very_far_from_the_middle_of_their_block_are_told_as_far_as_float32_reaches(compact: bool) -> None:
    case = random_layer(Shape(batch=2, heads=2, group=5, dim=128, channels=32, max_blocks=40, compact=compact), 6)
    case = replace(case, query=case.query * 60)
    logits = torch.einsum("hgd,htd->hgt", case.query[0].float().unflatten(0, (2, -1)), case.keys[0].float())
    assert float(logits.std(dim=2).max()) * case.shape.scale > 100  # e^100 is no float32
    # eight lanes each limit their part of a block's sum, so an estimate may be too low by a factor of 8; the scores of
    # the row's other blocks are relative to it
    torch.testing.assert_close(scored(case), case.expected_scores(), atol=6.0, rtol=1e-2)


def test_a_row_of_damaged_pages_is_scored_like_one_without_preferences() -> None:
    case = random_layer(Shape(batch=1, heads=1, group=5, dim=64, channels=32, max_blocks=9), 1, [9 * 32])
    case.digests.digests.fill_(torch.nan)
    assert_scores(scored(case), case.expected_scores())


def test_a_page_that_does_not_exist_scores_lowest() -> None:
    case = random_layer(Shape(batch=1, heads=2, group=3, dim=64, channels=32, max_blocks=12), 2, [12 * 32])
    case.step.page_table[0, 4], case.step.page_table[0, 9] = -1, case.keys.shape[0]
    found = scored(case)
    assert (found[0][:, [4, 9]] == torch.finfo(torch.float32).min).all() and (found[0][:, 5] > -1e6).all()


@pytest.mark.parametrize("active", [0, 1, 3])
def test_entries_that_are_not_active_are_not_scored(active: int) -> None:
    case = random_layer(Shape(batch=4, heads=2, group=5, dim=128, channels=32, max_blocks=12), active)
    found = scored(case.with_active(active))
    assert_scores(found[:active], case.expected_scores()[:active])
    assert (found[active:] == UNTOUCHED).all()


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.max_blocks > 1], ids=str)
def test_an_lse_is_shifted_as_the_reference_does(shape: Shape) -> None:
    case = random_layer(shape, 3)
    listed = 13
    random = seeded(1)
    pages = torch.randint(0, case.keys.shape[0], (shape.batch, shape.heads, listed), generator=random)
    counts = torch.randint(0, listed + 1, (shape.batch, shape.heads), generator=random)
    counts[0, 0] = listed
    pages = pages.masked_fill(torch.arange(listed) >= counts[..., None], -1).to(DEVICE)
    wrong = torch.randn(case.query.shape, generator=random).to(DEVICE) * 0.3
    ahead = (case.query.float() + wrong).to(shape.dtype)
    exact, predicted = (case.cache().estimates(q, pages.clamp(min=0), 0.0, shape.scale) for q in (case.query, ahead))
    expected = reference.lse_shift(exact, predicted, pages != -1, shape.scale)
    before = torch.randn(shape.batch, shape.heads * shape.group, generator=random).to(DEVICE)
    before[counts.to(DEVICE).repeat_interleave(shape.group, dim=1) == 0] = -torch.inf
    lse = before.clone()
    shift_lse(case.query, ahead, case.digests, pages.int(), counts.int().to(DEVICE), shape.scale, lse)
    torch.testing.assert_close(lse, before + expected, atol=TOLERANCE, rtol=1e-3)
    shift_lse(case.query, case.query, case.digests, pages.int(), counts.int().to(DEVICE), shape.scale, lse)
    torch.testing.assert_close(lse, before + expected, atol=TOLERANCE, rtol=1e-3)


def test_a_damaged_page_and_inactive_entries_shift_nothing() -> None:
    shape = Shape(batch=3, heads=2, group=5, dim=128, channels=32, max_blocks=10)
    case = random_layer(shape, 3)
    case.digests.digests[4] = torch.nan
    pages = torch.tensor([4, 5], device=DEVICE).expand(3, 2, 2).contiguous().int()
    pages[1] = 7
    counts = torch.full((3, 2), 2, dtype=torch.int32, device=DEVICE)
    lse = torch.zeros(3, 10, device=DEVICE)
    shift_lse(case.query, case.query * 2, case.digests, pages, counts, 1.0, lse, active_rows=numbers(2))
    assert not lse[0].any() and lse[1].all() and not lse[2].any()


def test_shapes_that_the_kernels_do_not_have_are_refused_with_what_they_have() -> None:
    for wrong in (replace(SHAPES[1], dim=96), replace(SHAPES[1], channels=16), replace(SHAPES[1], group=17)):
        case = random_layer(wrong, 0)
        with pytest.raises(ValueError, match=r"head_dim \(64, 128\), \(0, 32, 64\) sketch channels and up to 16"):
            scored(case)
