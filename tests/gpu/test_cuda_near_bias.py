"""The near bias on the GPU: selection computes it from the blocks left out, attention adds it to logits."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import DEVICE, random_slots, seeded
from cuda_cases import Shape as SlotShape
from selection_cases import LayerCase, Shape, bits_of, random_layer, random_table
from test_cuda_attention import SHAPES, assert_attention, attended

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.digests import SlotTable
from sglang_hybrid.ops.cuda.scoring import ScoreWorkspace, score_blocks
from sglang_hybrid.ops.cuda.selection import Misses, RecallPlan, select_blocks

SINK, RECENT, BUDGET = 1, 2, 16


def is_attended(case: LayerCase, table: SlotTable, misses: Misses) -> torch.Tensor:
    """Return which blocks are attended, in slots or from a list of misses: bool ``[B, H, blocks]``."""
    in_slots = table.positions[case.step.row_of.long()].long()
    return reference.is_listed(torch.cat((in_slots, misses.positions.long()), dim=2), case.shape.max_blocks)


def with_gathered(table: SlotTable, plan: RecallPlan) -> SlotTable:
    positions, count = table.positions.clone(), int(plan.count)
    positions.view(-1)[plan.destinations[:count].long()] = plan.positions[:count]
    return SlotTable(positions, table.sink, table.recent)


@pytest.mark.parametrize("share", [0.0, 0.6])
@pytest.mark.parametrize(
    ("group", "channels", "compact", "max_blocks"),
    [(1, 32, False, 70), (5, 32, True, 70), (5, 32, False, 300), (12, 64, False, 70), (3, 0, False, 70)],
)
def test_selection_tells_what_attended_blocks_have_of_all(
    group: int, channels: int, compact: bool, max_blocks: int, share: float
) -> None:
    dim = 128 if compact else 64
    shape = Shape(batch=4, heads=2, group=group, dim=dim, channels=channels, max_blocks=max_blocks, compact=compact)
    case = random_layer(shape, 3)
    table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, 9, 3)
    workspace = ScoreWorkspace(shape.batch, shape.heads, group, shape.max_blocks, DEVICE)
    scores = torch.zeros(shape.rows, shape.heads, shape.max_blocks, device=DEVICE)
    put_off = score_blocks(case.query, case.digests, case.step, shape.scale, workspace, scores, by_row=True)
    misses = Misses(shape.batch, shape.heads, BUDGET, DEVICE)
    gathered = RecallPlan(shape.batch * shape.heads * BUDGET, DEVICE) if share else None
    bias = torch.full((shape.rows, shape.heads, group), 7.0, device=DEVICE)
    select_blocks(
        scores, table, case.step, BUDGET, misses, pool_pages=case.keys.shape[0], put_off=put_off, by_row=True,
        near_bias=bias, gathered=gathered, gather_share=torch.tensor([share], device=DEVICE) if share else None,
    )  # fmt: skip
    if gathered is not None:
        assert int(gathered.count) > 0
        table = with_gathered(table, gathered)
    rows = case.step.row_of.long()
    attended = is_attended(case, table, misses)
    expected = reference.near_bias(case.logits(), attended, case.counts, shape.scale, SINK, RECENT)
    torch.testing.assert_close(bias[rows], expected, atol=0.02, rtol=1e-3)
    # a long row has a bias; a row whose blocks are all attended has none
    assert (expected < -0.01).any() and (bias[rows] == 0).any()
    others = torch.ones(shape.rows, dtype=torch.bool, device=DEVICE).index_fill(0, rows, False)
    assert (bias[others] == 7.0).all()


def test_whole_rows_miss_nothing_and_all_blocks_are_told_that_are_held_or_worth_it() -> None:
    shape = Shape(batch=4, heads=2, group=5, dim=128, channels=32, max_blocks=70, compact=True)
    case = random_layer(shape, 3)
    table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, 9, 3)
    workspace = ScoreWorkspace(shape.batch, shape.heads, shape.group, shape.max_blocks, DEVICE)
    scores = torch.zeros(shape.rows, shape.heads, shape.max_blocks, device=DEVICE)
    put_off = score_blocks(case.query, case.digests, case.step, shape.scale, workspace, scores, by_row=True)
    misses, whole = Misses(shape.batch, shape.heads, BUDGET, DEVICE), torch.tensor([1, 0, 1, 0]).int().to(DEVICE)
    bias = torch.zeros(shape.rows, shape.heads, shape.group, device=DEVICE)
    held = torch.full((shape.batch, shape.heads, 3), 7, dtype=torch.int32, device=DEVICE)
    least = -3.0
    select_blocks(
        scores, table, case.step, BUDGET, misses, pool_pages=case.keys.shape[0], put_off=put_off, by_row=True,
        near_bias=bias, whole=whole, whole_score=least, held=held,
    )  # fmt: skip
    rows = case.step.row_of.long()
    is_worth = scores[rows] >= least
    assert is_worth.any() and not is_worth.all()
    is_whole = whole.bool()
    assert not misses.counts[is_whole].any() and misses.counts[~is_whole].any()
    attended = is_attended(case, table, misses)
    assert (held[~is_whole] == 7).all()
    assert torch.equal(bits_of(held, shape.max_blocks)[is_whole], attended[is_whole])
    attended = attended | (is_worth & is_whole[:, None, None])
    expected = reference.near_bias(case.logits(), attended, case.counts, shape.scale, SINK, RECENT)
    torch.testing.assert_close(bias[rows], expected, atol=0.02, rtol=1e-3)


def test_without_estimates_nothing_is_told() -> None:
    shape = Shape(batch=1, heads=1, group=1, dim=64, channels=32, max_blocks=20)
    case = random_layer(shape, 3)
    table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, 9, 3)
    with pytest.raises(ValueError, match="nothing was estimated"):
        select_blocks(
            torch.zeros(1, 1, 20, device=DEVICE), table, case.step, BUDGET, Misses(1, 1, BUDGET, DEVICE), pool_pages=9,
            near_bias=torch.zeros(shape.rows, 1, 1, device=DEVICE),
        )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_blocks_that_are_always_in_get_the_bias(shape: SlotShape) -> None:
    case = random_slots(shape, 2)
    bias = -3 * torch.rand(shape.pool_rows, shape.heads, shape.group, generator=seeded(7)).to(DEVICE)
    found = attended(case, near_bias=bias, sink=SINK, recent=RECENT)
    assert_attention(found, case.expected(bias, SINK, RECENT), shape.dtype)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_a_bias_of_zero_changes_no_bit(shape: SlotShape) -> None:
    case = random_slots(shape, 5)
    nothing = torch.zeros(shape.pool_rows, shape.heads, shape.group, device=DEVICE)
    found = attended(case, near_bias=nothing, sink=SINK, recent=RECENT)
    assert all(torch.equal(one, other) for one, other in zip(found, attended(case), strict=True))
