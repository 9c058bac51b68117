"""Scores between two steps at which all blocks are scored."""

import math

import pytest
import torch
from attention_oracle import seeded

from sglang_hybrid.config import load_config
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.scout.scoring import RecentScores
from sglang_hybrid.policies.scout.tuning import hot_blocks_of, score_interval_of

HEADS, GROUP, BLOCKS, ROWS, SCALE = 2, 3, 40, 6, 0.5
COUNTS, ROW_OF = torch.tensor([40, 33, 9]), torch.tensor([4, 0, 2])


def random_logits(seed: int) -> torch.Tensor:
    return 6 * torch.randn(len(COUNTS), HEADS, GROUP, BLOCKS, generator=seeded(seed))


def shares_of(scores: torch.Tensor) -> torch.Tensor:
    return scores.exp().sum(dim=2)


def changed(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return (before != after).sum(dim=2)


def test_hot_blocks_are_the_best_but_the_tail() -> None:
    scores = reference.block_scores(random_logits(0), COUNTS, SCALE)
    hot = reference.hot_blocks(scores, COUNTS, 8)
    for entry, count in enumerate(COUNTS.tolist()):
        for head in range(HEADS):
            best = scores[entry, head, : count - 1].topk(8).indices
            assert set(hot[entry, head].nonzero()[:, 0].tolist()) == set(best.tolist())


def test_what_is_rescored_as_a_whole_are_the_scores() -> None:
    logits = random_logits(1)
    everything = torch.arange(BLOCKS) < COUNTS[:, None, None]
    shares = reference.hot_shares(reference.head_shares(logits, COUNTS, SCALE), everything.expand(-1, HEADS, -1))
    torch.testing.assert_close(shares, torch.zeros_like(shares), atol=1e-5, rtol=0)
    expected = reference.block_scores(logits, COUNTS, SCALE)
    found = reference.rescore(
        torch.full_like(expected, -math.inf), logits, everything.expand(-1, HEADS, -1), shares, SCALE
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_shares_add_up_to_one_for_each_head_however_large_logits_become(factor: float) -> None:
    recent, nobody = RecentScores(ROWS, 8), torch.zeros(3, dtype=torch.bool)
    first = recent.of_step(random_logits(2), COUNTS, ROW_OF, ~nobody, SCALE)
    second = recent.of_step(factor * random_logits(3), COUNTS, ROW_OF, nobody, SCALE)
    for scores in (first, second):
        torch.testing.assert_close(shares_of(scores), torch.full((3, HEADS), float(GROUP)), atol=1e-4, rtol=0)
    cold = first == second
    assert cold.sum(dim=2).tolist() == [[31, 31], [31, 31], [31, 31]]  # the last row has blocks that are none
    assert (changed(first, second) == 9).all()


def test_rows_are_scored_as_a_whole_in_their_turn_and_when_they_have_no_others() -> None:
    recent, everybody = RecentScores(ROWS, 8), torch.ones(3, dtype=torch.bool)
    scores = recent.of_step(random_logits(4), COUNTS, ROW_OF, everybody, SCALE)
    logits, turn = random_logits(5), torch.tensor([True, False, False])
    after = recent.of_step(logits, COUNTS, ROW_OF, turn, SCALE)
    expected = reference.block_scores(logits, COUNTS, SCALE)
    assert torch.equal(after[[0, 2]], expected[[0, 2]])
    assert (changed(scores, after)[1] == 9).all()


def test_without_hot_blocks_scores_stay_until_the_next_turn() -> None:
    recent, everybody = RecentScores(ROWS, 0), torch.ones(3, dtype=torch.bool)
    scores = recent.of_step(random_logits(6), COUNTS, ROW_OF, everybody, SCALE)
    assert torch.equal(recent.of_step(random_logits(7), COUNTS, ROW_OF, ~everybody, SCALE), scores)


def test_longer_rows_keep_what_they_had() -> None:
    recent, everybody = RecentScores(ROWS, 8), torch.ones(3, dtype=torch.bool)
    logits = random_logits(8)
    scores = recent.of_step(logits[..., :36], COUNTS.clamp(max=36), ROW_OF, everybody, SCALE)
    after = recent.of_step(logits, COUNTS, ROW_OF, ~everybody, SCALE)
    assert torch.equal(after[2, :, :9], scores[2, :, :9]) and after.shape[2] == BLOCKS
    assert ((after[0, :, :36] == scores[0]).sum(dim=1) >= 27).all()


def test_a_gpu_scores_all_blocks_less_often() -> None:
    assert [score_interval_of(load_config(None, []), on_gpu=on_gpu) for on_gpu in (False, True)] == [1, 4]
    assert score_interval_of(load_config(None, ["scout.score_interval=2"]), on_gpu=True) == 2


def test_hot_tokens_follow_the_budget() -> None:
    assert hot_blocks_of(load_config(None, ["budget_tokens=1024"])) == 128
    assert hot_blocks_of(load_config(None, ["scout.hot_tokens=640"])) == 20
    assert hot_blocks_of(load_config(None, ["scout.hot_tokens=0"])) == 0
