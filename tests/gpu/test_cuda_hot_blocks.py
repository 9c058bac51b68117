"""Hot blocks on the GPU: scored at every step, the others in turn, against the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded
from selection_cases import LayerCase, Shape, numbers, random_layer, random_table

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.digests import Step
from sglang_hybrid.ops.cuda.scoring import HotBlocks, ScoreInterval, ScoreWorkspace, score_blocks
from sglang_hybrid.ops.cuda.selection import Misses, select_blocks

SINK, RECENT = 2, 3


@pytest.mark.parametrize(("group", "most", "max_blocks"), [(1, 8, 40), (5, 20, 50), (5, 100, 300), (12, 7, 30)])
def test_hot_blocks_are_scored_at_every_step_and_all_of_them_in_turn(group: int, most: int, max_blocks: int) -> None:
    shape = Shape(batch=5, heads=2, group=group, dim=64, channels=32, max_blocks=max_blocks)
    longest = max_blocks * BLOCK_TOKENS - 40
    # the second row opens a block, and so does the third: it has others than hot ones from then on
    case = random_layer(shape, 8, [longest, longest - 32 * 3 - 2, (most + 1) * 32 - 2, (most + 2) * 32, 5])
    rows = case.step.row_of.long()
    table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, 3, 4)
    workspace = ScoreWorkspace(shape.batch, shape.heads, group, max_blocks, DEVICE)
    scores = torch.full((shape.rows, shape.heads, max_blocks), -math.inf, device=DEVICE)
    hot = HotBlocks.none_yet(shape.rows, shape.heads, group, most, DEVICE)
    first_lengths = torch.zeros(shape.rows, dtype=torch.int32, device=DEVICE)
    first_lengths[rows] = case.step.lengths
    misses = Misses(shape.batch, shape.heads, 20, DEVICE)
    bias = torch.zeros(shape.rows, shape.heads, group, device=DEVICE)
    in_part = 0
    for step in range(1, 9):
        begins = numbers(*[step == 1] * shape.batch)
        before, is_tail = scores[rows].cpu(), position_is(case.counts.cpu() - 1, max_blocks)
        was_hot, shares = positions_are(hot.positions[rows].cpu(), max_blocks), hot.shares[rows].cpu() * math.log(2)
        put_off = score_blocks(
            case.query, case.digests, case.step, shape.scale, workspace, scores, by_row=True,
            interval=ScoreInterval(4, first_lengths, begins, 2, hot),
        )  # fmt: skip
        select_blocks(scores, table, case.step, 20, misses, pool_pages=case.keys.shape[0], put_off=put_off, by_row=True,
                      near_bias=bias)  # fmt: skip
        found, counts, logits = scores[rows].cpu(), case.counts.cpu(), case.logits().cpu()
        turn = torch.full_like(counts, step == 1 or (step + 2) % 4 == 0, dtype=torch.bool) | (counts <= most + 1)
        in_part += int((~turn).sum())
        whole = reference.block_scores(logits, counts, shape.scale)
        part = reference.rescore(before, logits, was_hot | is_tail, shares, shape.scale)
        expected = torch.where(turn[:, None, None], whole, part)
        torch.testing.assert_close(found, expected, atol=0.02, rtol=1e-3)
        held = torch.cat((table.positions[rows], misses.positions), dim=2).cpu().long()
        known = logits, reference.is_listed(held, max_blocks), counts, shape.scale, SINK, RECENT
        of_part = reference.near_bias_by_hot(*known, was_hot | is_tail, shares)
        expected = torch.where(turn[:, None, None], reference.near_bias(*known), of_part)
        torch.testing.assert_close(bias[rows].cpu(), expected, atol=0.02, rtol=1e-3)
        chosen = turn & (counts > most)
        is_hot = reference.hot_blocks(found, counts, most)
        assert torch.equal(positions_are(hot.positions[rows].cpu(), max_blocks)[chosen], is_hot[chosen])
        shares = reference.hot_shares(reference.head_shares(logits, counts, shape.scale), is_hot | is_tail)
        torch.testing.assert_close(hot.shares[rows].cpu()[chosen] * math.log(2), shares[chosen], atol=0.02, rtol=1e-3)
        noise = torch.randn(case.query.shape, generator=seeded(step)).to(DEVICE, shape.dtype)
        case = replace(case, query=0.95 * case.query + 0.6 * noise, step=longer(case))
    assert in_part > 8


def position_is(positions: torch.Tensor, blocks: int) -> torch.Tensor:
    return (torch.arange(blocks) == positions[:, None])[:, None, :]


def positions_are(positions: torch.Tensor, blocks: int) -> torch.Tensor:
    """The same for lists ``[B, H, n]`` -> ``[B, H, blocks]``."""
    return (torch.arange(blocks)[:, None] == positions[:, :, None, :]).any(dim=3)


def longer(case: LayerCase) -> Step:
    """One token more in each row."""
    step, lengths = case.step, case.step.lengths + 1
    table = step.page_table.clone()
    opened = (-(-lengths // BLOCK_TOKENS) - 1).long()
    last = table.gather(1, opened[:, None])
    fresh = torch.arange(len(lengths), device=DEVICE, dtype=torch.int32)[:, None]  # any page will do
    return replace(
        step, lengths=lengths, page_table=table.scatter(1, opened[:, None], torch.where(last < 0, fresh, last))
    )
