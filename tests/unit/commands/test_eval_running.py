"""Answers that are decoded in this process end where a server would end them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.running import Evaluation, Variant
from sglang_hybrid.config import HybridConfig

END = 9


class Counting:
    """Stand-in session: each row counts up from its first token. Token 9 ends an answer; 0 follows 9."""

    end_tokens = frozenset({END})

    def __init__(self, *first: int) -> None:
        self.steps = 0
        self.logits = torch.eye(10)[list(first)]

    def prefill(self, prompts: Sequence[Sequence[int]], progress: Callable[[float], None]) -> Counting:
        return self

    def use(self, config: HybridConfig) -> None: ...

    def watch_ratio(self, watcher: Callable[[int, float], None] | None) -> None: ...

    def rewind(self) -> None: ...

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return torch.eye(10)[(tokens + 1) % 10]

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class NoBar:
    def say(self, text: str) -> None: ...

    def advance(self, cost: float) -> None: ...


def answers(session: Counting, *new_tokens: int) -> list[str]:
    prompts = [RetrievalPrompt("needle", (0,), ("1",), 10, 0.5, new) for new in new_tokens]
    evaluation = Evaluation(session, [Variant("a", {}, HybridConfig())], NoBar())
    evaluation.measure(prompts)
    return [answer.text for answer in evaluation.runs()[0].answers]


def test_an_answer_ends_before_its_end_token_or_at_its_limit() -> None:
    assert answers(Counting(6, 1, 9), 6, 2, 6) == ["6 7 8", "1 2", ""]


def test_nothing_is_decoded_behind_the_end_of_the_last_answer() -> None:
    session = Counting(7, 8)
    assert answers(session, 50, 50) == ["7 8", "8"]
    assert session.steps == 2


def test_a_group_that_is_interrupted_does_not_count() -> None:
    class Interrupted(Counting):
        def use(self, config: HybridConfig) -> None:
            if self.steps and config.policy == "full":
                raise KeyboardInterrupt

    variants = [Variant("a", {}, HybridConfig()), Variant("b", {}, HybridConfig(policy="full"))]
    session, bar = Interrupted(6), NoBar()
    evaluation = Evaluation(session, variants, bar)
    evaluation.measure([RetrievalPrompt("needle", (0,), ("1",), 10, 0.5, 1)])  # no step: prefill gives the only token
    with pytest.raises(KeyboardInterrupt):
        evaluation.measure([RetrievalPrompt("needle", (0,), ("1",), 10, 0.5, 3)])
    assert evaluation.measured == 1
    assert [[answer.text for answer in run.answers] for run in evaluation.runs()] == [["6"], ["6"]]
