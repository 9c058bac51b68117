"""Progress bars of long work, and the lines that replace them where output is no terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import pytest
import torch
from rich.console import Console

from sglang_hybrid.commands.eval.prompts import RetrievalPrompt, TextPrompt
from sglang_hybrid.commands.eval.running import Evaluation, Variant, cost
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.progress import steps


def test_a_long_step_says_every_ten_percent_where_no_bar_is_drawn() -> None:
    written = io.StringIO()
    with steps(Console(file=written), total=200) as bar:
        bar.say("prefill")
        for _ in range(100):
            bar.advance(1)
    lines = [line.strip() for line in written.getvalue().splitlines() if line.strip().endswith("prefill")]
    assert lines[:6] == [f"{percent} % prefill" for percent in (0, 10, 20, 30, 40, 50)]


def test_a_bar_shows_percent() -> None:
    written = io.StringIO()
    with steps(Console(file=written, force_terminal=True, width=120), total=4) as bar:
        bar.say("prefill")
        bar.advance(1)
    assert "25%" in written.getvalue()


class RecordedBar:
    def __init__(self) -> None:
        self.done = 0.0
        self.during_prefill: list[float] = []

    def say(self, text: str) -> None: ...

    def advance(self, cost: float) -> None:
        self.done += cost


class FakeSession:
    """Stand-in session: prefill reports four parts, and every step answers token 1."""

    logits = torch.eye(4)[[1, 1]]
    end_tokens: frozenset[int] = frozenset()

    def __init__(self, bar: RecordedBar) -> None:
        self._bar = bar

    def prefill(self, prompts: Sequence[Sequence[int]], progress: Callable[[float], None]) -> FakeSession:
        for _ in range(4):
            progress(0.25)
            self._bar.during_prefill.append(self._bar.done)
        return self

    def use(self, config: HybridConfig) -> None: ...

    def watch_ratio(self, watcher: Callable[[int, float], None] | None) -> None: ...

    def rewind(self) -> None: ...

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits

    def text(self, ids: Sequence[int]) -> str:
        return "1"


TEXTS = [TextPrompt((0,) * 100, (1, 1, 1), 0), TextPrompt((0,) * 60, (1, 1, 1), 0)]
QUESTIONS = [RetrievalPrompt("needle", (0,) * 100, ("1",), 100, 0.5, new) for new in (3, 5)]


@pytest.mark.parametrize("group", [TEXTS, QUESTIONS], ids=["texts", "retrieval"])
def test_an_evaluation_advances_during_prefill_and_ends_at_what_it_was_to_cost(
    group: Sequence[TextPrompt | RetrievalPrompt],
) -> None:
    bar = RecordedBar()
    variants = [Variant("a", {}, HybridConfig()), Variant("b", {}, HybridConfig())]
    evaluation = Evaluation(FakeSession(bar), variants, bar)
    evaluation.measure(group)
    tokens = sum(len(prompt.ids) for prompt in group)
    assert bar.during_prefill == [tokens * part / 4 for part in (1, 2, 3, 4)]
    assert bar.done == cost(group, len(variants))
