"""Blocks that a predicted query has missed and the real one asks for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.scout.options import ScoutOptions
from sglang_hybrid.policies.scout.policy import ScoutPolicy
from sglang_hybrid.policies.scout.rules import rules_of_scout
from sglang_hybrid.policies.scout.tuning import tuning_of
from sglang_hybrid.worker.torch_attention import TorchMisses

T, HEADS, GROUP, DIM, BLOCKS, SCALE = 32, 2, 3, 16, 50, 0.25
NEEDLE = 23  # the block that the real query looks for


class Haystack:
    """A row in which one block has keys like the real query's, and values like no other block's."""

    def __init__(self, layer: int) -> None:
        random = torch.Generator().manual_seed(4)
        keys, values = 0.3 * torch.randn(2, BLOCKS, HEADS, T, DIM, generator=random)
        self.query = torch.randn(1, HEADS * GROUP, DIM, generator=random)
        asked = self.query.view(HEADS, GROUP, DIM).mean(dim=1)
        # blind for the needle: to the prediction, that block is one like all others
        blind = torch.randn(HEADS, GROUP, DIM, generator=random)
        along = torch.nn.functional.normalize(asked, dim=1)[:, None]
        self.predicted = (blind - (blind * along).sum(dim=2, keepdim=True) * along).view_as(self.query)
        keys[NEEDLE] += 4 * asked[:, None]
        values[NEEDLE] = 1.0
        self._keys, self._values, tokens = keys, values, BLOCKS * T - 5
        full = torch.full((BLOCKS,), T)
        self.cache = LayerCache(keys, values, reference.minmax_digest(keys, full), layer)
        self.batch = DecodeBatch(torch.arange(BLOCKS)[None], torch.tensor([tokens]), [tokens], torch.tensor([0]), [0])

    def exact(self) -> torch.Tensor:
        ids = self.batch.page_table[:, None].expand(-1, HEADS, -1)
        fill = reference.block_fill(ids, self.batch.lengths, T)
        return reference.attend_blocks(self.query, self._keys, self._values, ids, fill, SCALE)[0]

    def error(self, ahead: torch.Tensor | None, score_interval: int = 1, **options: float) -> float:
        settings = ScoutOptions(score_interval=score_interval, **options)  # type: ignore[arg-type]
        config = HybridConfig(budget_tokens=8 * T, sections={"scout": settings})
        rules = dataclasses.replace(rules_of_scout(config), stands_for_all=False)
        policy = ScoutPolicy(config, rules, TorchMisses(), tuning_of(config, 2))
        policy.reset_rows([0])
        policy.begin_step(self.batch)
        if ahead is not None:
            policy.ahead(ahead, self.cache, self.batch, SCALE)
        return float((policy.decode(self.query, self.cache, self.batch, SCALE) - self.exact()).norm())


@pytest.mark.parametrize("score_interval", [1, 4])
def test_the_real_query_still_finds_what_a_prediction_missed(score_interval: int) -> None:
    row = Haystack(layer=1)
    real = row.error(None)
    never, late = (row.error(row.predicted, score_interval, min_late_attention=share) for share in (1.0, 0.01))
    assert never > 3 * real and late < 1.5 * real


def test_blocks_with_little_attention_are_left_alone() -> None:
    row = Haystack(layer=1)
    assert row.error(row.predicted, min_late_attention=0.99) == row.error(row.predicted, min_late_attention=1.0)


def test_the_first_layer_has_its_real_query_ahead() -> None:
    row = Haystack(layer=0)
    assert row.error(row.predicted, min_late_attention=0.0) == row.error(row.predicted, min_late_attention=1.0)
