"""Base class of experiments: what an experiment needs, how it is measured, and how its result is shown."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sglang_hybrid.commands.report.content import Element, Note
from sglang_hybrid.commands.report.context import Context
from sglang_hybrid.commands.report.paper_numbers import Number, Source

_FOLDER = re.compile(r"=/\S*/")

Result = dict[str, Any]
Variants = list[tuple[str, list[str]]]  # (name, settings) pairs

# Kind of loaded model that an experiment uses. ORDER is the order of runs: users of the same model follow each other.
Uses = Literal["nothing", "text", "codes", "speed"]
ORDER: tuple[Uses, ...] = ("nothing", "text", "codes", "speed")


@dataclass(frozen=True)
class Shown:
    elements: tuple[Element, ...]
    settings: tuple[str, ...] = ()  # one line per run


class Experiment(ABC):
    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    question: ClassVar[str]  # question that the experiment answers, one sentence
    numbers: ClassVar[tuple[str, ...]] = ()  # fields of Size that the result depends on
    uses: ClassVar[Uses] = "text"
    by_arithmetic: ClassVar[bool] = False

    def missing(self, context: Context) -> str | None:
        """Return the reason why this experiment cannot run here, in words, or None if it can."""
        return None

    @abstractmethod
    def run(self, context: Context) -> Result:
        """Measure, and return a result of values that JSON can hold. Raise MeasurementError for a failure."""

    @abstractmethod
    def draw(self, result: Result) -> Shown:
        """Return figures, tables and notes for a result, which may come from a file."""


def needs_policy(context: Context, *names: str) -> str | None:
    absent = [name for name in names if name not in context.policies]
    if not absent:
        return None
    there = ", ".join(context.policies)
    return f"policy {', '.join(absent)} is not registered in this installation, which has {there}"


def cited(numbers: Iterable[Number | Source]) -> str:
    sources = dict.fromkeys(str(one.source if isinstance(one, Number) else one) for one in numbers)
    return "Paper: " + "; ".join(sources) + "."


def settings_lines(runs: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Return one line of settings per run, with file names in place of paths: paths of one machine help no reader."""
    lines = (f"{run['name']}: {' '.join(run['settings'])}" for run in runs if run.get("settings"))
    return tuple(_FOLDER.sub("=", line) for line in lines)


def refused_notes(result: Result) -> tuple[Note, ...]:
    return tuple(Note(f"{name} was left out: {why}", "warning") for name, why in result.get("refused", {}).items())


def by_name(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in runs}


def shown(value: float | None, form: str = "{:.3f}") -> str:
    return "–" if value is None else form.format(value)  # noqa: RUF001


def percent(value: float | None, form: str = "{:.1f} %") -> str:
    return shown(None if value is None else 100 * value, form)


def change_of(run: dict[str, Any]) -> str:
    """Return the change of a run's perplexity against full attention as text, with the 95 % interval."""
    change = run.get("perplexity_change")
    if not change or change["mean"] is None:
        return "–"  # noqa: RUF001
    ends = [change["low"], change["high"]]
    interval = "" if None in ends else f" [{100 * ends[0]:+.1f}, {100 * ends[1]:+.1f}]"
    return f"{100 * change['mean']:+.1f} %{interval}"


def score_of(run: dict[str, Any], task: str) -> float | None:
    found = run["tasks"].get(task)
    return None if found is None else float(found["score"])
