"""What a report shows, apart from how a page or a Markdown file writes it down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True)
class Figure:
    name: str  # of its file, without an ending
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
    question: str  # what the experiment answers, in a sentence
    status: Literal["measured", "arithmetic", "skipped", "failed"]
    elements: tuple[Element, ...] = ()
    settings: tuple[str, ...] = ()  # of the runs, one line each
    command: str = ""  # that makes this section alone
    origin: dict[str, Any] = field(default_factory=dict)  # commit, date, machine
    seconds: float | None = None


@dataclass(frozen=True)
class Report:
    title: str
    facts: tuple[tuple[str, str], ...]  # name and value, on top of the page
    sections: tuple[Section, ...]
