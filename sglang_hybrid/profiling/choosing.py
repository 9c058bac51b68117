"""From what the simulation shows to what a profile says: bonus and interval of each layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_hybrid.profiling.recording import LayerRecord
from sglang_hybrid.profiling.simulation import Budget, Choice, simulate
from sglang_hybrid.scout.recall import LONGEST

BONUSES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, LONGEST)
_BONUS_INTERVAL = 8  # at which bonuses are compared

# What a bonus may cost: attention missed, relative to no bonus, and in parts of all attention.
_WORSE, _WORSE_SHARE = 1.02, 0.0005

# Other text than the profile's has other ratios.
_MARGIN = 0.8


def choose_bonus(records: Sequence[LayerRecord], budget: Budget) -> float:
    """The largest bonus whose selection misses hardly more attention than without one."""
    choices = [Choice(bonus, _BONUS_INTERVAL) for bonus in BONUSES]
    missed = torch.stack([simulate(record, choices, budget).missed.mean(dim=1) for record in records]).mean(dim=0)
    allowed = float(missed[0]) * _WORSE + _WORSE_SHARE
    best = 0.0
    for bonus, loss in zip(BONUSES, missed.tolist(), strict=True):
        if loss > allowed:
            break
        best = bonus
    return best


def choose_interval(records: Sequence[LayerRecord], budget: Budget, bonus: float, beta: float) -> int:
    """The largest interval that keeps the mean CPU compute ratio under beta, with some room."""
    choices = [Choice(bonus, interval) for interval in INTERVALS]
    ratio = torch.stack([simulate(record, choices, budget).ratio.mean(dim=1) for record in records]).mean(dim=0)
    fitting = [interval for interval, seen in zip(INTERVALS, ratio.tolist(), strict=True) if seen <= _MARGIN * beta]
    return max(fitting, default=INTERVALS[0])


def block_change(records: Sequence[LayerRecord], budget: Budget) -> float:
    """Part of a selection that is new at each step, without bonus."""
    seen = [simulate(record, [Choice(0.0, 1)], budget).change.mean() for record in records]
    return float(torch.stack(seen).mean())
