"""From what a model said to numbers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_hybrid.commands.eval import needle
from sglang_hybrid.commands.eval.longbench import PREFIX
from sglang_hybrid.commands.eval.longbench_datasets import dataset
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.result import Answer, NeedleGrid, TaskResult
from sglang_hybrid.commands.eval.ruler import scoring as ruler

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_]+")  # Chinese and Japanese have no spaces: by character
_ARTICLES = {"a", "an", "the"}
_CHOICES_AT_ONCE = 1_000_000


# -- one answer --------------------------------------------------------------------------------------------------------


def found(text: str, answers: Sequence[str]) -> bool:
    """Whether all answers appear, in any case and spacing, but not as a part of a longer word or number."""
    if not answers:
        raise ValueError("no answers to find")
    text = _plain(text)
    return all(re.search(rf"(?<![0-9a-z]){re.escape(_plain(answer))}(?![0-9a-z])", text) for answer in answers)


def f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall of words, without articles and punctuation, as SQuAD and LongBench do."""
    said, wanted = Counter(_words(text)), Counter(_words(answer))
    if common := (said & wanted).total():
        precision, recall = common / said.total(), common / wanted.total()
        return 2 * precision * recall / (precision + recall)
    return 0.0


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _words(text: str) -> list[str]:
    # "it's" is "its" for SQuAD, which drops punctuation before it splits
    words = _WORD.findall(re.sub(r"['\u2019]", "", text.casefold()))
    return [word for word in words if word not in _ARTICLES]


@dataclass(frozen=True)
class Answered:
    prompt: RetrievalPrompt
    text: str  # decoded behind the prompt

    @property
    def score(self) -> float:
        """0 to 1."""
        prompt = self.prompt
        if prompt.task.startswith(ruler.PREFIX):
            return ruler.score(prompt.metric, self.text, prompt.answers)
        if not prompt.task.startswith(PREFIX):
            return float(found(self.text, prompt.answers))
        settings = dataset(prompt.task.removeprefix(PREFIX))
        text = _first_line(self.text) if settings.first_line else self.text
        if settings.metric == "contains":
            return float(any(found(text, [answer]) for answer in prompt.answers))
        return max(f1(text, answer) for answer in prompt.answers)

    @property
    def metric(self) -> str:
        return self.prompt.metric or metric_of(self.prompt.task)

    def kept(self) -> Answer:
        prompt = self.prompt
        return Answer(prompt.task, prompt.length, prompt.depth, self.metric, prompt.answers, self.text, self.score)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def metric_of(task: str) -> str:
    """What a score of this task means: "found", "contains" (any of the answers) or "F1" (with the best of them)."""
    return dataset(task.removeprefix(PREFIX)).metric if task.startswith(PREFIX) else "found"


# -- many answers ------------------------------------------------------------------------------------------------------


def task_results(answered: Sequence[Answered]) -> tuple[TaskResult, ...]:
    """One for each task, in the order of their first prompts, and behind them one over all tasks of RULER."""
    tasks: dict[str, list[Answered]] = {}
    for one in answered:
        tasks.setdefault(one.prompt.task, []).append(one)
    results = [
        TaskResult(task, its[0].metric, tuple(one.score for one in its), _by_length(task, its))
        for task, its in tasks.items()
    ]
    of_ruler = [one for one in answered if one.prompt.task.startswith(ruler.PREFIX)]
    if count := len({one.prompt.task for one in of_ruler}):
        scores = tuple(one.score for one in of_ruler)
        results.append(TaskResult(ruler.MEAN, f"mean of {count} tasks", scores, _by_length(ruler.MEAN, of_ruler)))
    return tuple(results)


def _by_length(task: str, answered: Sequence[Answered]) -> dict[int, float]:
    if task.startswith(PREFIX):  # nearly every prompt has its own
        return {}
    scores: dict[int, list[float]] = {}
    for one in answered:
        scores.setdefault(one.prompt.length, []).append(one.score)
    return {length: mean(scores[length]) for length in sorted(scores)}


def needle_grid(answered: Iterable[Answered]) -> NeedleGrid | None:
    """Accuracy over depth and length, of task "needle" only; None without one."""
    cells: dict[tuple[float, int], list[float]] = {}
    for one in answered:
        if one.prompt.task == needle.TASK and one.prompt.depth is not None:
            cells.setdefault((one.prompt.depth, one.prompt.length), []).append(one.score)
    if not cells:
        return None
    depths = tuple(sorted({depth for depth, _ in cells}))
    lengths = tuple(sorted({length for _, length in cells}))
    accuracy = tuple(
        tuple(mean(cells[depth, length]) if (depth, length) in cells else None for length in lengths)
        for depth in depths
    )
    return NeedleGrid(lengths, depths, accuracy)


# -- logprobs and divergences ------------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("the mean of nothing")
    return math.fsum(values) / len(values)


def perplexity(logprobs: Sequence[float]) -> float:
    """Of natural logarithms, one for each token. Infinite where a token was impossible."""
    loss = -mean(logprobs)
    return math.exp(loss) if loss < 700 else math.inf  # beyond that a float ends


@dataclass(frozen=True)
class KlSummary:
    mean: float
    p95: float


def kl_summary(steps: Sequence[float]) -> KlSummary:
    """Of one KL divergence (nats, full attention to this run) for each decode step of all prompts."""
    return KlSummary(mean(steps), float(np.percentile(steps, 95)))


# -- differences -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Mean of a run less the mean of the baseline, and the interval that has it with 95 %."""

    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def paired_difference(
    baseline: Sequence[float], other: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> Difference:
    """Bootstrap over prompts, which both runs have in the same order: what prompts differ in cancels out.

    With few prompts the interval is too narrow; with one it says nothing and is the difference itself.
    """
    if len(baseline) != len(other) or not baseline:
        raise ValueError(f"{len(baseline)} and {len(other)} prompts: a paired difference needs the same, at least one")
    differences = np.subtract(other, baseline)
    random = np.random.default_rng(seed)
    count, means = len(differences), np.empty(0)
    while (left := resamples - len(means)) > 0:  # in parts: all choices at once may not fit in memory
        chosen = random.integers(0, count, (min(left, max(1, _CHOICES_AT_ONCE // count)), count))
        means = np.append(means, differences[chosen].mean(axis=1))
    low, high = np.percentile(means, [2.5, 97.5])
    return Difference(float(differences.mean()), float(low), float(high))
