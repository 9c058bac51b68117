"""What policy ``scout`` would do on a recorded decode, for many bonuses and recall intervals at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_hybrid.profiling.recording import LayerRecord


@dataclass(frozen=True)
class Choice:
    bonus: float
    interval: int  # 0: never


@dataclass(frozen=True)
class Simulated:
    ratio: torch.Tensor  # [choices, steps] CPU compute ratio: misses over budget
    missed: torch.Tensor  # [choices, steps] share of attention that is neither resident nor selected
    unselected: torch.Tensor  # [choices, steps] share of attention that is not selected, resident or not
    change: torch.Tensor  # [choices, steps] part of the selection that the step before did not have


@dataclass(frozen=True)
class Budget:
    blocks: int
    sink: int
    recent: int
    worth: float = -math.inf  # the lowest score of a block that is computed although it is not resident


def simulate(record: LayerRecord, choices: Sequence[Choice], budget: Budget) -> Simulated:
    """Resident sets are masks over blocks here, ``[choices, rows, KV heads, blocks]``."""
    steps, rows, heads, blocks = record.scores.shape
    bonus = torch.tensor([choice.bonus for choice in choices])[:, None, None, None]
    intervals = torch.tensor([choice.interval for choice in choices])
    limit = min(budget.blocks, blocks)
    position = torch.arange(blocks)
    resident = torch.zeros(len(choices), rows, heads, blocks, dtype=torch.bool)
    before = resident
    ratios, misses_of, unselected, changes = [], [], [], []
    for step in range(steps):
        age = record.counts[step][:, None] - 1 - position  # [rows, blocks]
        forced = (((age <= budget.recent) | (position < budget.sink)) & (age >= 0))[:, None, :]
        beyond = (age < 0)[:, None, :]
        scores = record.scores[step].masked_fill(beyond, -torch.inf)
        if step == 0:
            resident = _best(scores.masked_fill(forced, torch.inf), limit)[None] & ~forced & ~beyond
            resident = resident.expand(len(choices), -1, -1, -1).clone()
        else:
            opened = record.counts[step] > record.counts[step - 1]
            resident = _with_leaving(resident, scores, age, opened, budget)
        ranked = (scores + bonus * resident).masked_fill(forced, torch.inf).masked_fill(beyond, -torch.inf)
        selected = _best(ranked, limit) & ~beyond
        missing = selected & ~resident & ~forced & (scores >= budget.worth)
        attended = missing | resident | forced
        ratios.append(missing.float().sum(dim=3).mean(dim=(1, 2)) / budget.blocks)
        misses_of.append(1 - (record.shares[step] * attended).sum(dim=3).mean(dim=(1, 2)))
        unselected.append(1 - (record.shares[step] * (selected | forced)).sum(dim=3).mean(dim=(1, 2)))
        changes.append((selected & ~before).float().sum(dim=3).mean(dim=(1, 2)) / limit)
        before = selected
        due = (intervals > 0) & ((step + 1) % intervals.clamp(min=1) == 0)
        resident = torch.where(due[:, None, None, None], selected & ~forced, resident)
    return Simulated(*(torch.stack(one, 1) for one in (ratios, misses_of, unselected, changes[1:] or changes)))


def _best(scores: torch.Tensor, limit: int) -> torch.Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(limit, dim=-1).indices, True)


def _with_leaving(
    resident: torch.Tensor, scores: torch.Tensor, age: torch.Tensor, opened: torch.Tensor, budget: Budget
) -> torch.Tensor:
    """A block that is recent no more stays, in place of the worst resident where there is no room.

    ``opened`` ``[rows]``: whose step is the first of a new block.
    """
    leaving = (age == budget.recent + 1) & (torch.arange(age.shape[1]) >= budget.sink) & opened[:, None]
    slots = max(0, budget.blocks - budget.sink - budget.recent - 1)
    resident = resident | leaving[:, None, :]
    if not (resident.sum(dim=3) > slots).any():
        return resident
    kept = scores.masked_fill(leaving[:, None, :], torch.inf).expand_as(resident).masked_fill(~resident, -torch.inf)
    return _best(kept, min(slots, kept.shape[3])) & resident
