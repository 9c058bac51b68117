"""Computes scores from decoded texts and log probabilities."""

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
    """Return True if all answers appear, in any case and spacing, but not inside a longer word or number."""
    if not answers:
        raise ValueError("no answers to find")
    text = _plain(text)
    return all(re.search(rf"(?<![0-9a-z]){re.escape(_plain(answer))}(?![0-9a-z])", text) for answer in answers)


def f1(text: str, answer: str) -> float:
    """Return the F1 score of words (0 to 1), without articles and punctuation, as SQuAD and LongBench do."""
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
    text: str  # decoded after the prompt

    @property
    def score(self) -> float:
        """The score of the text by the metric of the prompt's task, 0 to 1."""
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
    """Return what scores of ``task`` measure: "found" (all answers), "contains" (any answer) or "F1" (best answer)."""
    return dataset(task.removeprefix(PREFIX)).metric if task.startswith(PREFIX) else "found"


# -- many answers ------------------------------------------------------------------------------------------------------


def task_results(answered: Sequence[Answered]) -> tuple[TaskResult, ...]:
    """Return one result per task, in the order of first prompts, then one over all tasks of RULER, if there are any."""
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
    if task.startswith(PREFIX):  # nearly every prompt of LongBench has a length of its own
        return {}
    scores: dict[int, list[float]] = {}
    for one in answered:
        scores.setdefault(one.prompt.length, []).append(one.score)
    return {length: mean(scores[length]) for length in sorted(scores)}


def needle_grid(answered: Iterable[Answered]) -> NeedleGrid | None:
    """Return the accuracy of task "needle" by depth and length, None if no prompt of this task was answered."""
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
    """Return the perplexity of natural log probabilities, one per token. Infinite if a token was impossible."""
    loss = -mean(logprobs)
    return math.exp(loss) if loss < 700 else math.inf  # beyond that exp overflows


@dataclass(frozen=True)
class KlSummary:
    mean: float
    p95: float


def kl_summary(steps: Sequence[float]) -> KlSummary:
    """Summarise KL divergences (nats, full attention to this run), one for each decode step of all prompts."""
    return KlSummary(mean(steps), float(np.percentile(steps, 95)))


# -- differences -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Mean of a run minus mean of the baseline, and the 95 % interval of this difference."""

    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """True if the interval does not contain zero."""
        return self.low > 0 or self.high < 0


def paired_difference(
    baseline: Sequence[float], other: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> Difference:
    """Return the mean difference and its interval, by bootstrap over prompts.

    Both runs have the same prompts in the same order, so that differences between prompts cancel out. With few prompts
    the interval is too narrow. With one prompt the interval is the difference itself and says nothing.
    """
    if len(baseline) != len(other) or not baseline:
        raise ValueError(f"{len(baseline)} and {len(other)} prompts: a paired difference needs the same, at least one")
    differences = np.subtract(other, baseline)
    random = np.random.default_rng(seed)
    count, means = len(differences), np.empty(0)
    while (left := resamples - len(means)) > 0:  # in parts: all resampled indices at once may not fit in memory
        chosen = random.integers(0, count, (min(left, max(1, _CHOICES_AT_ONCE // count)), count))
        means = np.append(means, differences[chosen].mean(axis=1))
    low, high = np.percentile(means, [2.5, 97.5])
    return Difference(float(differences.mean()), float(low), float(high))
