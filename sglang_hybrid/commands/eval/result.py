"""The results of an evaluation, as plain values that can be written to a file and read again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TaskResult:
    task: str
    metric: str  # "found", "contains", "F1", or one of RULER's
    scores: tuple[float, ...]  # one for each prompt, 0 to 1; all runs have the same prompts in the same order
    by_length: dict[int, float] = field(default_factory=dict)  # mean score; empty if prompts have no nominal length

    @property
    def score(self) -> float:
        return math.fsum(self.scores) / len(self.scores)


@dataclass(frozen=True)
class NeedleGrid:
    lengths: tuple[int, ...]  # ascending
    depths: tuple[float, ...]  # ascending
    accuracy: tuple[tuple[float | None, ...], ...]  # [depth][length]; None: no prompt


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt, with all that is needed to score the answer again."""

    task: str
    length: int  # of the prompt, nominal, in tokens
    depth: float | None
    metric: str
    expected: tuple[str, ...]
    text: str
    score: float  # 0 to 1


@dataclass(frozen=True)
class Run:
    """The measurements of one configuration. None or an empty tuple: not measured."""

    name: str
    settings: dict[str, object] = field(default_factory=dict)
    tasks: tuple[TaskResult, ...] = ()
    perplexity: float | None = None
    loss_by_prompt: tuple[float, ...] = ()  # mean of -logprob, in prompt order: for the paired interval
    # compared with the first run on the same text
    kl_mean: float | None = None
    kl_p95: float | None = None
    top1_agreement: float | None = None  # 0 to 1
    cpu_ratio: float | None = None  # misses / budget, in blocks: what the CPU computes
    needle: NeedleGrid | None = None
    answers: tuple[Answer, ...] = ()  # to all prompts, also to those that other runs did not answer
