"""Chooses bonus, recall interval and least share of each layer for a profile, from simulations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from sglang_hybrid.commands.profile.records import LayerRecord
from sglang_hybrid.commands.profile.share_costs import SHARES, LayerCost
from sglang_hybrid.commands.profile.simulation import Budget, Choice, simulate

BONUSES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_BONUS_INTERVAL = 8  # decode steps between two recalls where bonuses are compared

_ROUNDING = 1e-6

# Part of beta that an interval may reach: text other than the profile's has other ratios.
_MARGIN = 0.8

# Part of the CPU compute ratio without recall that an interval may reach: a recall that does not bring the ratio well
# below half is hardly worth its copies.
_OF_NO_RECALL = 0.4


# Misses if least shares decide, as a part of the misses if all selected blocks count, both without a bonus. With a
# bonus, as served, misses are fewer still.
_OF_NOT_STICKY = 0.43


def choose_shares(costs: Sequence[LayerCost], norms: Sequence[float]) -> list[float]:
    """Return the least share of a miss for each layer, so that all layers pay the same price for the next omitted miss.

    The price is the squared change of a layer's output, over the norm (``norms``) of the residual stream that the
    output is added to. Neither the change itself nor the change over the squared norm predicts the effect at the end:
    an early layer's change is diluted by what is added later, and later layers amplify it. The effect on the
    distribution of the next token, with one layer at a time that leaves blocks out, lies between the two.
    """
    ratio = torch.stack([cost.ratio for cost in costs])
    moved = torch.stack([cost.moved / norm for cost, norm in zip(costs, norms, strict=True)])
    moved = moved / moved.sum()
    most = _OF_NOT_STICKY * sum(cost.not_sticky for cost in costs)
    low, high = 1e-9, 1e9
    for _ in range(100):
        price = math.sqrt(low * high)
        if float(ratio.gather(1, _cheapest(moved, ratio, price)).sum()) > most:
            low = price
        else:
            high = price
    return [SHARES[n] for n in _cheapest(moved, ratio, high).flatten().tolist()]


def _cheapest(moved: torch.Tensor, ratio: torch.Tensor, price: float) -> torch.Tensor:
    # in double precision: the bisection ends where two shares of one layer cost nearly the same
    return (moved.double() + price * ratio.double()).argmin(dim=1, keepdim=True)


def choose_bonus(records: Sequence[LayerRecord], budget: Budget) -> float:
    """Return the largest bonus with which no more attention is missed than with exactly the best blocks of every step.

    The best blocks are what a budget promises. Resident blocks that are not selected are attended as well, and their
    attention makes up for the blocks that a bonus keeps out. The least share of a miss is not applied here: the
    attention of misses below it is spread so thinly that answers do not change without them.
    """
    budget = dataclasses.replace(budget, min_miss_score=-math.inf)
    choices = [Choice(bonus, _BONUS_INTERVAL) for bonus in BONUSES]
    simulated = [simulate(record, choices, budget) for record in records]
    missed = torch.stack([one.missed.mean(dim=1) for one in simulated]).mean(dim=0)
    allowed = float(torch.stack([one.unselected[0].mean() for one in simulated]).mean())
    best = 0.0
    for bonus, loss in zip(BONUSES, missed.tolist(), strict=True):
        if loss > allowed + _ROUNDING:
            break
        best = bonus
    return best


def choose_interval(records: Sequence[LayerRecord], budget: Budget, bonus: float, beta: float) -> int:
    """Return the largest interval that keeps the mean CPU compute ratio below beta, with a margin, and well below the
    ratio without recall; the smallest interval if none does."""
    choices = [Choice(bonus, interval) for interval in (*INTERVALS, 0)]
    ratios = torch.stack([simulate(record, choices, budget).ratio.mean(dim=1) for record in records]).mean(dim=0)
    *of_intervals, never = ratios.tolist()
    most = min(_MARGIN * beta, _OF_NO_RECALL * never)
    fitting = [interval for interval, ratio in zip(INTERVALS, of_intervals, strict=True) if ratio <= most]
    return max(fitting, default=INTERVALS[0])


def block_change(records: Sequence[LayerRecord], budget: Budget) -> float:
    """Return the part of a selection (0 to 1) that is new at each step, without a bonus."""
    seen = [simulate(record, [Choice(0.0, 1)], budget).change.mean() for record in records]
    return float(torch.stack(seen).mean())
