"""A heat map for the terminal: layers from top to bottom, time from left to right, two values in one character."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

from sglang_hybrid.commands.top.colours import colour, shade, top_of_scale

_LABEL = 4  # columns for the number of a layer
_LEGEND = 16  # columns of the colour bar

Column = Sequence[float | None]  # one moment: a value per layer


@dataclass(frozen=True)
class HeatMap:
    """A heat map that rich can print. ``columns`` are moments, oldest first, at least one of them with a layer. The
    scale begins at zero and ends at ``least`` or above."""

    columns: Sequence[Column]
    least: float
    unit: str
    height: int  # lines, including the legend

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, options.max_width - _LABEL - 1)
        shown = self.columns[-width:]
        layers = max(len(column) for column in shown)
        lines = max(1, self.height - 1)
        in_colour = console.color_system is not None
        rows = 2 * lines if in_colour else lines
        group = math.ceil(layers / rows)
        means = [[_mean(column[first : first + group]) for first in range(0, layers, group)] for column in shown]
        top = top_of_scale((value for column in means for value in column), self.least)
        step = 2 if in_colour else 1
        for first in range(0, math.ceil(layers / group), step):
            yield Segment(f"{first * group:>{_LABEL}} ", Style(dim=True))
            yield Segment(" " * (width - len(shown)))
            for column in means:
                upper, lower = (column[row] if row < len(column) else None for row in (first, first + 1))
                yield _colours(upper, lower, top) if in_colour else _shade(upper, top)
            yield Segment.line()
        yield from self._legend(top, in_colour)

    def _legend(self, top: float, in_colour: bool) -> RenderResult:
        yield Segment(f"{'layer':<{_LABEL + 2}}", Style(dim=True))
        yield Segment("0 ")
        for index in range(_LEGEND):
            share = index / (_LEGEND - 1)
            yield Segment(" ", Style(bgcolor=_rich(share))) if in_colour else Segment(shade(share))
        yield Segment(f" {top:g} {self.unit}")
        yield Segment.line()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rich(share: float) -> Color:
    return Color.from_rgb(*colour(share))


def _colours(upper: float | None, lower: float | None, top: float) -> Segment:
    """Return one character that shows two values: a half block for one of them, its background for the other."""
    if upper is None and lower is None:
        return Segment(" ")
    if lower is None:
        return Segment("▀", Style(color=_rich((upper or 0.0) / top)))
    if upper is None:
        return Segment("▄", Style(color=_rich(lower / top)))
    return Segment("▀", Style(color=_rich(upper / top), bgcolor=_rich(lower / top)))


def _shade(value: float | None, top: float) -> Segment:
    return Segment(" " if value is None else shade(value / top))
