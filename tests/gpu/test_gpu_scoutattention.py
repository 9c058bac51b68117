"""Policy scoutattention on the GPU, by the paper's rules: one selection for all KV heads, and only it is attended."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE
from test_gpu_scout import (
    DTYPE,
    HEADS,
    LAYERS,
    MAX_BLOCKS,
    RECENT,
    SCALE,
    SINK,
    STEPS,
    Decoding,
)

from sglang_hybrid.engines.cuda.layers import DeviceLayer
from sglang_hybrid.engines.cuda.scoutattention import DeviceScoutAttention
from sglang_hybrid.engines.cuda.settings import ScoutSettings
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient

ON_GPU = DEVICE == "cuda"


class Paper(Decoding):
    def __init__(self, budget: int, interval: int, slots: int | None = None, worker: bool = False) -> None:
        super().__init__(budget, interval, slots, worker)
        self.budget = budget
        self.predicted = torch.zeros_like(self.query)

    def program(
        self, layers: list[DeviceLayer], settings: ScoutSettings, interval: int, client: DeviceMailboxClient | None
    ) -> DeviceScoutAttention:
        settings = dataclasses.replace(settings, bonus=(0.0,) * LAYERS)
        return DeviceScoutAttention(layers, self.shape, settings, (interval,) * LAYERS, client)

    def next_tokens(self) -> None:
        super().next_tokens()
        noise = torch.randn(self.query.shape, generator=self.random).to(DEVICE, DTYPE)
        self.predicted.copy_(self.query + 0.3 * noise)

    def selected(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Return which blocks ``query`` selects, equal for all KV heads: bool ``[rows, KV heads, blocks]``."""
        logits, counts = self.logits(layer, query)
        scores = reference.block_scores(logits, counts, SCALE)
        shared = scores.logsumexp(dim=1, keepdim=True).expand_as(scores)
        return self.is_held(reference.select_blocks(shared, counts, self.budget, SINK, RECENT))

    def in_slots(self, layer: int) -> torch.Tensor:
        """Return the positions of the blocks in slots that are attended: ``[rows, KV heads, slots]``, -1 for none."""
        attended: torch.Tensor = self.scout._attended(layer)[self.rows].cpu().long()
        return attended

    def part(self, layer: int, query: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = reference.block_ids(positions, self.pages)
        fill = reference.block_fill(positions, self.lengths, BLOCK_TOKENS)
        return reference.attend_blocks(query, self.keys[layer].float(), self.values[layer].float(), ids, fill, SCALE)

    def check(self, layer: int, predicts: bool) -> tuple[int, int]:
        """Return how many blocks must be attended, and how many of them are."""
        real, ahead = (part[layer, :-1].cpu().float() for part in (self.query, self.predicted))
        slots, misses = self.in_slots(layer), self.misses(layer)
        assert not (self.is_held(slots) & self.is_held(misses)).any(), "a block is attended twice"
        found = self.is_held(torch.cat((slots, misses), dim=2))
        assert (found == found[:, :1]).all(), "KV heads attend to different blocks"
        # with prediction, the worker attends with the predicted query
        missed = self.part(layer, ahead if predicts and self.mailbox else real, misses)
        expected, _ = reference.merge(*self.part(layer, real, slots), *missed)
        torch.testing.assert_close(self.out[layer, :-1].cpu().float(), expected, rtol=2e-2, atol=2e-2)
        chosen = self.selected(layer, ahead if predicts else real)
        assert int(found.sum()) == int(chosen.sum())
        return int(chosen.sum()), int((found & chosen).sum())


@pytest.mark.parametrize("recorded", [False, True] if ON_GPU else [False])
@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("worker", [False, True])
@pytest.mark.parametrize(("budget", "slots", "interval"), [(9, None, 0), (9, 6, 2), (36, None, 4)])
def test_exactly_the_selected_blocks_are_attended(
    budget: int, slots: int | None, interval: int, worker: bool, predicts: bool, recorded: bool
) -> None:
    decoding = Paper(budget, interval, slots, worker)
    wanted = found = 0
    with decoding.engine():
        decoding.load_initial_blocks()
        torch.cuda.synchronize()
        for _ in decoding.steps(predicts, recorded):
            decoding.check_slots()
            for layer in range(LAYERS):
                more, of_them = decoding.check(layer, predicts)
                wanted, found = wanted + more, found + of_them
    assert found >= 0.99 * wanted > 0  # of two blocks with equal scores, either may be selected
    assert int(decoding.scout.refused) == 0


@pytest.mark.parametrize("interval", [1, 3])
def test_what_was_selected_by_the_predicted_query_becomes_resident(interval: int) -> None:
    decoding = Paper(9, interval)
    first = decoding.lengths + 1
    wanted = found = 0
    decoding.load_initial_blocks()
    for _ in range(STEPS):
        decoding.next_tokens()
        torch.cuda.synchronize()
        before = [decoding.is_held(decoding.held(layer)) for layer in range(LAYERS)]
        decoding.run(predicts=True)
        torch.cuda.synchronize()
        decoding.check_slots()
        for layer in range(LAYERS):
            chosen = decoding.selected(layer, decoding.predicted[layer, :-1].cpu().float())
            held, counts = decoding.is_held(decoding.held(layer)), -(-decoding.lengths // BLOCK_TOKENS)
            due = (decoding.lengths - first + 1 + layer) % interval == 0
            wanted += int(chosen[due].sum())
            found += int((chosen & held)[due].sum())
            tail = torch.nn.functional.one_hot(counts - 1, MAX_BLOCKS).bool()[:, None].expand(-1, HEADS, -1)
            assert not (held & ~before[layer] & ~tail)[~due].any(), "somebody recalled whose turn it was not"
    assert found >= 0.99 * wanted > 0
