"""Which blocks policy ``scout`` has in slots at each decode step of one row on a GPU, and which it reads in the step.

All misses are copied to slots before they are attended to, as on a GPU whose worker computes none of them
(``scout.cpu_share=0``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bench.attended.plain_model import Shape
from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.commands.profile.simulation import Budget, best, best_of, with_leaving
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.cuda.settings import ScoutSettings, scout_tuning, settings_of
from sglang_hybrid.policies.scout.recall import RecallSchedule
from sglang_hybrid.policies.scout.tuning import tuning_of


@dataclass(frozen=True)
class Rules:
    """The settings by which a server selects blocks of a model."""

    settings: ScoutSettings
    recalls: RecallSchedule
    group: int  # query heads of a KV head, whose shares of attention a block's score sums

    @classmethod
    def of(cls, config: HybridConfig, shape: Shape) -> Rules:
        tuning = scout_tuning(config, tuning_of(config, shape.layers), has_profile=False)
        settings = settings_of(config, tuning, shape.group)
        recalls = RecallSchedule(tuning.intervals, tuning.beta, adapt=False, early=settings.early_recalls)
        return cls(settings, recalls, shape.group)

    def is_first(self, step: int, length: int) -> bool:
        """Return True if a step reads all blocks that matter. ``step``: from 1 on; ``length``: tokens of the row."""
        whole = self.settings.whole
        return whole is not None and step <= whole.steps and length > whole.beyond


@dataclass(frozen=True)
class Row:
    """The blocks of a row at the end of its prompt (entry 0), and at each decode step (from entry 1 on)."""

    lengths: list[int]  # tokens, with that of the step
    counts: torch.Tensor  # [entries]: blocks
    age: torch.Tensor  # [entries, blocks]: 0 is the tail, negative is beyond the row's end
    near: torch.Tensor  # [entries, blocks]: sink, recent and tail blocks, which are attended to in any case

    @classmethod
    def of(cls, prompt: int, steps: int, rules: Rules, device: torch.device) -> Row:
        lengths = list(range(prompt, prompt + steps + 1))
        counts = torch.tensor([-(-length // BLOCK_TOKENS) for length in lengths], device=device)
        position = torch.arange(int(counts[-1]), device=device)
        age = counts[:, None] - 1 - position
        near = ((age <= rules.settings.recent) | (position < rules.settings.sink)) & (age >= 0)
        return cls(lengths, counts, age, near)

    @property
    def candidates(self) -> torch.Tensor:
        """``[entries, blocks]``: all blocks that exist but sink, recent and tail blocks."""
        return (self.age >= 0) & ~self.near


@dataclass(frozen=True)
class Selected:
    """The candidates that each step attends to, in one layer: masks ``[steps, KV heads, blocks]``."""

    resident: torch.Tensor  # in slots when the step's attention begins
    late: torch.Tensor  # without a slot when the step began, and read from host memory in the step
    expected: torch.Tensor  # those that a predicted query expects the step to attend to

    @property
    def attended(self) -> torch.Tensor:
        return self.resident | self.late


def select(
    row: Row, real: torch.Tensor, predicted: torch.Tensor, layer: int, rules: Rules, first_share: float | None
) -> Selected:
    """Select by scores ``[entries, KV heads, blocks]`` of the real and of the predicted query of each entry of ``row``.

    ``first_share``: minimum estimated attention of a block that a first step reads, as in ``Variant``.
    """
    settings, candidates = rules.settings, row.candidates
    budget = Budget(settings.budget, settings.sink, settings.recent)
    least = math.inf if first_share is None else math.log(first_share * rules.group) if first_share else -math.inf
    steps = range(1, len(row.lengths))
    due = rules.recalls.due(layer, torch.tensor(list(steps))).tolist()

    def best_blocks(scores: torch.Tensor, entry: int, resident: torch.Tensor) -> torch.Tensor:
        ranked = scores + settings.bonus[layer] * resident
        ranked = ranked.masked_fill(row.near[entry], torch.inf).masked_fill(row.age[entry] < 0, -torch.inf)
        return best(ranked, min(budget.blocks, ranked.shape[-1])) & candidates[entry]

    resident = best_blocks(real[:1], 0, torch.zeros_like(real[:1], dtype=torch.bool))
    found: list[tuple[torch.Tensor, ...]] = []
    for step in steps:
        here, ahead = real[step : step + 1], predicted[step : step + 1]
        if row.lengths[step] % BLOCK_TOKENS == 1:  # a new tail: one block is no longer recent, and keeps its slot
            opened = torch.ones(1, dtype=torch.bool, device=real.device)
            resident = with_leaving(resident, ahead, row.age[step : step + 1], opened, budget)
        if rules.is_first(step, row.lengths[step]):
            late = (here >= least) & candidates[step] & ~resident
            expected = resident | ((ahead >= least) & candidates[step])
        else:
            selected = best_blocks(ahead, step, resident)
            late = selected & ~resident & (ahead >= settings.min_miss_score[layer])
            resident = best_of(resident | late, ahead.masked_fill(selected, torch.inf), budget.room)
            expected = resident
        found.append((resident, late, expected))
        if due[step - 1]:
            resident = best_blocks(here, step, resident)
    return Selected(*(torch.cat(masks) for masks in zip(*found, strict=True)))
