"""Selected blocks stand for all blocks that could be selected, so always attended blocks get less weight."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.memory.sketches import LayerSketch
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.scout.options import ScoutOptions
from sglang_hybrid.policies.scout.policy import ScoutPolicy
from sglang_hybrid.policies.scout.rules import rules_of_scout
from sglang_hybrid.policies.scout.tuning import tuning_of
from sglang_hybrid.worker.torch_attention import TorchMisses

T, HEADS, GROUP, DIM, BLOCKS = 32, 2, 3, 16, 20
SCALE, SINK, RECENT = DIM**-0.5, 1, 2


def random_logits(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return estimates, a mask of attended blocks, and the number of blocks of each row."""
    random = torch.Generator().manual_seed(seed)
    counts = torch.tensor([BLOCKS, 9, 1])
    logits = torch.randn(3, HEADS, GROUP, BLOCKS, generator=random) * 4
    return reference.without_tail(logits, counts), torch.rand(3, HEADS, BLOCKS, generator=random) < 0.5, counts


def test_the_bias_is_the_share_of_what_is_attended_among_what_could_be() -> None:
    logits, attended, counts = random_logits(1)
    found = reference.near_bias(logits, attended, counts, SCALE, SINK, RECENT)
    for row, head, one in [(row, head, one) for row in range(2) for head in range(HEADS) for one in range(GROUP)]:
        weight = {
            block: math.exp(float(logits[row, head, one, block]) * SCALE)
            for block in range(SINK, int(counts[row]) - 1 - RECENT)
        }
        of_attended = sum(weight[block] for block in weight if attended[row, head, block])
        assert float(found[row, head, one]) == pytest.approx(math.log(of_attended / sum(weight.values())), abs=1e-4)


def test_there_is_none_where_everything_is_attended_or_nothing_can_be_told() -> None:
    logits, attended, counts = random_logits(2)
    everything = reference.near_bias(logits, torch.ones_like(attended), counts, SCALE, SINK, RECENT)
    nothing = reference.near_bias(logits, torch.zeros_like(attended), counts, SCALE, SINK, RECENT)
    assert (everything == 0).all() and (nothing == 0).all()


# -- policy scout ----------------------------------------------------------------------------


class OneLayer:
    """One layer of a row with random keys and values and sketches of all channels. The newest values are large."""

    def __init__(self, tokens: int) -> None:
        random = torch.Generator().manual_seed(5)
        blocks = -(-tokens // T)
        keys, values = torch.randn(2, blocks, HEADS, T, DIM, generator=random)
        values[-2:] += 3
        filled = torch.full((blocks,), T)
        filled[-1] = tokens - (blocks - 1) * T
        digests = reference.minmax_digest(keys, filled)
        channels = torch.arange(DIM).expand(HEADS, -1)
        sketch = LayerSketch(reference.sketch_codes(keys, digests, channels), channels)
        self._keys, self._values = keys, values
        self.cache = LayerCache(keys, values, digests, 0, sketch)
        self.batch = DecodeBatch(torch.arange(blocks)[None], torch.tensor([tokens]), [tokens], torch.tensor([0]), [0])

    def exact(self, query: torch.Tensor) -> torch.Tensor:
        ids = self.batch.page_table[:, None].expand(-1, HEADS, -1)
        fill = reference.block_fill(ids, self.batch.lengths, T)
        return reference.attend_blocks(query, self._keys, self._values, ids, fill, SCALE)[0]


def decode(
    layer: OneLayer, budget: int, query: torch.Tensor, ahead: torch.Tensor | None, *, stands: bool
) -> torch.Tensor:
    config = HybridConfig(budget_tokens=budget, sections={"scout": ScoutOptions(min_miss_attention=0.0)})
    rules = dataclasses.replace(rules_of_scout(config), stands_for_all=stands)
    policy = ScoutPolicy(config, rules, TorchMisses(), tuning_of(config, 1))
    policy.reset_rows([0])
    policy.begin_step(layer.batch)
    if ahead is not None:
        policy.ahead(ahead, layer.cache, layer.batch, SCALE)
    return policy.decode(query, layer.cache, layer.batch, SCALE)


def some_query(size: float) -> torch.Tensor:
    return size * torch.randn(1, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("predicted", [False, True])
def test_heads_that_look_everywhere_get_closer_to_full_attention(predicted: bool) -> None:
    layer, query = OneLayer(60 * T - 3), some_query(0.5)
    ahead = 1.2 * query if predicted else None
    exact = layer.exact(query)
    without, found = (
        float((decode(layer, 12 * T, query, ahead, stands=stands) - exact).norm()) for stands in (False, True)
    )
    assert found < 0.3 * without


def test_a_budget_that_holds_the_context_leaves_no_bit_to_estimates() -> None:
    layer, query = OneLayer(9 * T - 3), some_query(1.0)
    found, without = (decode(layer, 9 * T, query, None, stands=stands) for stands in (True, False))
    assert torch.equal(found, without)
