"""Compares a run with the baseline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_hybrid.commands.eval.result import Run
from sglang_hybrid.commands.eval.scoring import Difference, paired_difference


@dataclass(frozen=True)
class Comparison:
    tasks: dict[str, Difference]  # differences of scores: below zero is worse than the baseline
    perplexity: Difference | None  # relative, 0.01 is 1 % more: above zero is worse


def compare(baseline: Run, run: Run) -> Comparison:
    """Compare what both runs have measured. Raise ValueError if the runs did not have the same prompts."""
    scores = {task.task: task.scores for task in baseline.tasks}
    tasks = {}
    for task in run.tasks:
        if task.task in scores:
            try:
                tasks[task.task] = paired_difference(scores[task.task], task.scores)
            except ValueError as error:
                raise ValueError(f"{run.name} and {baseline.name}, task {task.task}: {error}") from error
    return Comparison(tasks, _perplexity(baseline, run))


def _perplexity(baseline: Run, run: Run) -> Difference | None:
    losses = (*baseline.loss_by_prompt, *run.loss_by_prompt)
    if not baseline.loss_by_prompt or not run.loss_by_prompt or not all(map(math.isfinite, losses)):
        return None
    loss = paired_difference(baseline.loss_by_prompt, run.loss_by_prompt)
    # a difference of losses is the logarithm of a ratio of perplexities
    return Difference(*(_expm1(value) for value in (loss.mean, loss.low, loss.high)))


def _expm1(value: float) -> float:
    return math.expm1(value) if value < 700 else math.inf
