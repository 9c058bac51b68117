"""Measures the cost of leaving misses out: how far a layer's output moves, for many least shares at once.

A least share is the smallest share of a KV head's attention with which a block counts as a miss. The cost depends on
values, which a recording does not keep, so it is measured while one exact decode runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sglang_hybrid.commands.profile.records import BlockParts
from sglang_hybrid.commands.profile.simulation import Budget, best, best_of, with_leaving
from sglang_hybrid.policies.scout.tuning import FIRST_STEPS

# The least shares that are compared. With the last one there are no misses.
SHARES = (*(1e-4 * 2 ** (n / 2) for n in range(17)), 1.0)
_INTERVAL = 8  # decode steps between two recalls, as where bonuses are compared


@dataclass(frozen=True)
class LayerCost:
    """Costs of one layer, as means over the steps. ``[shares]``: one value for each of SHARES."""

    ratio: torch.Tensor  # [shares] CPU compute ratio if the share alone decides what is a miss
    moved: torch.Tensor  # [shares] squared change of the layer's attention, as it is added to the residual stream
    not_sticky: float  # CPU compute ratio if all selected blocks that are not resident are misses


class _Layer:
    def __init__(self, device: torch.device) -> None:
        self.steps = 0
        self.ratio, self.moved = torch.zeros(2, len(SHARES), device=device).unbind(0)
        self.not_sticky = 0.0
        self.resident = torch.empty(0)
        self.counts = torch.empty(0)


class ShareCosts:
    """Adds up the costs of least shares over steps. Resident blocks are those of policy ``scout`` without a bonus."""

    def __init__(self, budget: Budget, group: int, projections: Mapping[int, torch.Tensor]) -> None:
        """``projections`` by layer: ``[hidden, query heads * value dim]``, from attention to the residual stream."""
        self._budget = budget
        self._projections = projections
        # A score is the logarithm of the sum of the shares of a group's query heads.
        device = next(iter(projections.values())).device
        self._worth = torch.tensor([math.log(share * group) for share in SHARES], device=device)[:, None, None, None]
        self._layers: dict[int, _Layer] = {}

    def of(self, layer: int) -> LayerCost:
        seen = self._layers[layer]
        return LayerCost(seen.ratio / seen.steps, seen.moved / seen.steps, seen.not_sticky / seen.steps)

    def add(
        self, layer: int, scores: torch.Tensor, real_scores: torch.Tensor, counts: torch.Tensor, parts: BlockParts
    ) -> None:
        """Add one step: scores by predicted and real query ``[rows, KV heads, blocks]``, block counts ``[rows]``."""
        seen, budget = self._layers.setdefault(layer, _Layer(scores.device)), self._budget
        blocks = scores.shape[2]
        position = torch.arange(blocks, device=scores.device)
        age = counts[:, None] - 1 - position
        forced = (((age <= budget.recent) | (position < budget.sink)) & (age >= 0))[:, None, :]
        beyond = (age < 0)[:, None, :]
        scores = scores.masked_fill(beyond, -torch.inf)
        selected, wanted = (
            best(of.masked_fill(beyond, -torch.inf).masked_fill(forced, torch.inf), min(budget.blocks, blocks))
            & ~forced
            & ~beyond
            for of in (scores, real_scores)
        )
        if seen.steps == 0:
            resident = selected
        else:
            kept = torch.nn.functional.pad(seen.resident, (0, blocks - seen.resident.shape[2]))
            resident = with_leaving(kept[None], scores, age, counts > seen.counts, budget)[0]
        missing = best_of(~resident & ~forced & ~beyond & (scores >= self._worth), scores, budget.room)
        seen.steps += 1
        seen.ratio += missing.float().sum(dim=3).mean(dim=(1, 2)) / budget.blocks
        seen.moved += self._moved(layer, missing | resident | forced, parts)
        seen.not_sticky += float((selected & ~resident).float().sum(dim=2).mean()) / budget.blocks
        is_due = seen.steps % _INTERVAL == 0 or seen.steps <= FIRST_STEPS
        seen.resident = wanted if is_due else resident
        seen.counts = counts

    def _moved(self, layer: int, attended: torch.Tensor, parts: BlockParts) -> torch.Tensor:
        """Return the squared change of the output: attended ``[shares, rows, KV heads, blocks]`` -> ``[shares]``."""
        rows, heads, group, _, dim = parts.outputs.shape
        lists = attended.permute(1, 2, 0, 3).float()  # [rows, KV heads, shares, blocks]
        outputs = (lists @ parts.outputs.transpose(2, 3).flatten(3)).view(rows, heads, -1, group, dim)
        outputs = outputs / (lists @ parts.shares.transpose(2, 3)).unsqueeze(4)
        change = (outputs - parts.outputs.sum(dim=3).unsqueeze(2)).permute(2, 0, 1, 3, 4).flatten(2)
        projected = change @ self._projections[layer].to(change).T
        return projected.square().sum(dim=2).mean(dim=1)
