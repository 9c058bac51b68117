"""Simulates policy ``scout`` on a recorded decode, for many bonuses and recall intervals at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_hybrid.commands.profile.records import LayerRecord
from sglang_hybrid.policies.scout.tuning import FIRST_STEPS, beyond_selection


@dataclass(frozen=True)
class Choice:
    bonus: float
    interval: int  # decode steps between two recalls; 0: never
    min_miss_score: float | None = None  # replaces the budget's; None: the budget's


@dataclass(frozen=True)
class Simulated:
    ratio: torch.Tensor  # [choices, steps] CPU compute ratio: misses over budget
    missed: torch.Tensor  # [choices, steps] share of attention to blocks that are not attended
    unselected: torch.Tensor  # [choices, steps] share of attention to blocks that are not selected, resident or not
    change: torch.Tensor  # [choices, steps] part of the selection that was not selected at the step before


@dataclass(frozen=True)
class Budget:
    blocks: int
    sink: int
    recent: int
    min_miss_score: float = -math.inf  # the lowest score of a miss
    any_block: bool = False  # True: blocks that are not selected can be misses, where beyond_selection allows it

    @property
    def room(self) -> int:
        """Number of blocks of a selection beside sink, recent and tail blocks."""
        return max(0, self.blocks - self.sink - self.recent - 1)


def simulate(record: LayerRecord, choices: Sequence[Choice], budget: Budget) -> Simulated:
    """Simulate all choices on ``record``. Resident sets are masks here: ``[choices, rows, KV heads, blocks]``."""
    steps, rows, heads, blocks = record.scores.shape
    device = record.scores.device
    bonus = torch.tensor([choice.bonus for choice in choices], device=device)[:, None, None, None]
    intervals = torch.tensor([choice.interval for choice in choices], device=device)
    least = [budget.min_miss_score if choice.min_miss_score is None else choice.min_miss_score for choice in choices]
    min_miss_score = torch.tensor(least, device=device)[:, None, None, None]
    beyond_selected = [budget.any_block and beyond_selection(choice.interval) for choice in choices]
    any_block = torch.tensor(beyond_selected, device=device)[:, None, None, None]
    limit = min(budget.blocks, blocks)
    position = torch.arange(blocks, device=device)
    resident = torch.zeros(len(choices), rows, heads, blocks, dtype=torch.bool, device=device)
    before = resident
    ratios, misses_of, unselected, changes = [], [], [], []
    for step in range(steps):
        age = record.counts[step][:, None] - 1 - position  # [rows, blocks]
        forced = (((age <= budget.recent) | (position < budget.sink)) & (age >= 0))[:, None, :]
        beyond = (age < 0)[:, None, :]
        scores = record.scores[step].masked_fill(beyond, -torch.inf)
        if step == 0:
            resident = best(scores.masked_fill(forced, torch.inf), limit)[None] & ~forced & ~beyond
            resident = resident.expand(len(choices), -1, -1, -1).clone()
        else:
            opened = record.counts[step] > record.counts[step - 1]
            resident = with_leaving(resident, scores, age, opened, budget)
        selected, wanted = (
            best((of + bonus * resident).masked_fill(forced, torch.inf).masked_fill(beyond, -torch.inf), limit)
            & ~beyond
            for of in (scores, record.real_scores[step])
        )
        missing = ~resident & ~forced & ~beyond & (scores >= min_miss_score)
        of_selection, missing = missing & selected, best_of(missing, scores, budget.room)
        missing = torch.where(any_block, missing, of_selection)
        attended = missing | resident | forced
        ratios.append(missing.float().sum(dim=3).mean(dim=(1, 2)) / budget.blocks)
        misses_of.append(1 - (record.shares[step] * attended).sum(dim=3).mean(dim=(1, 2)))
        unselected.append(1 - (record.shares[step] * (selected | forced)).sum(dim=3).mean(dim=(1, 2)))
        changes.append((selected & ~before).float().sum(dim=3).mean(dim=(1, 2)) / limit)
        before = selected
        due = (intervals > 0) & (((step + 1) % intervals.clamp(min=1) == 0) | (step < FIRST_STEPS))
        resident = torch.where(due[:, None, None, None], wanted & ~forced, resident)
    return Simulated(*(torch.stack(one, 1) for one in (ratios, misses_of, unselected, changes[1:] or changes)))


def best(scores: torch.Tensor, limit: int) -> torch.Tensor:
    """Return a mask of the ``limit`` best scores in the last dimension."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(limit, dim=-1).indices, True)


def best_of(blocks: torch.Tensor, scores: torch.Tensor, limit: int) -> torch.Tensor:
    """Return the mask ``blocks``; where it has more than ``limit`` blocks, only those with the best scores."""
    if not (blocks.sum(dim=-1) > limit).any():
        return blocks
    return best(scores.expand_as(blocks).masked_fill(~blocks, -torch.inf), min(limit, blocks.shape[-1])) & blocks


def with_leaving(
    resident: torch.Tensor, scores: torch.Tensor, age: torch.Tensor, opened: torch.Tensor, budget: Budget
) -> torch.Tensor:
    """Return ``resident`` with the block that leaves the recent window. In a full set it replaces the worst block.

    ``opened`` ``[rows]``: True for rows in which this step began a new block.
    """
    position = torch.arange(age.shape[1], device=age.device)
    leaving = (age == budget.recent + 1) & (position >= budget.sink) & opened[:, None]
    resident = resident | leaving[:, None, :]
    return best_of(resident, scores.masked_fill(leaving[:, None, :], torch.inf), budget.room)
