"""Content of a report: sections of figures, tables and notes, independent of HTML and Markdown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True)
class Figure:
    name: str  # file name without extension
    caption: str
    drawing: Drawing


@dataclass(frozen=True)
class Table:
    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Note:
    text: str
    kind: Literal["note", "warning"] = "note"


Element = Figure | Table | Note


@dataclass(frozen=True)
class Section:
    """One experiment of a report: measured, skipped or failed."""

    name: str
    title: str
    paper: str
    question: str  # question that the experiment answers, one sentence
    status: Literal["measured", "arithmetic", "skipped", "failed"]
    elements: tuple[Element, ...] = ()
    settings: tuple[str, ...] = ()  # backend settings of the runs, one line each
    command: str = ""  # command line that makes only this section
    origin: dict[str, Any] = field(default_factory=dict)  # commit, date, machine, load average
    seconds: float | None = None  # duration of the measurement


@dataclass(frozen=True)
class Report:
    title: str
    facts: tuple[tuple[str, str], ...]  # (name, value) pairs at the top of the page
    sections: tuple[Section, ...]
