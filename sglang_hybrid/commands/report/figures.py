"""Figures in one style: readable on a light and on a dark page, and without distinguishing red from green."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sglang_hybrid.commands.eval.plots import tokens_label

# Okabe and Ito's colours, by policy: the same in every figure
COLOURS = {
    "full": "#7f7f7f", "stock": "#7f7f7f", "full attention": "#7f7f7f", "scout": "#0072b2", "scoutattention": "#d55e00",
    "hgca": "#009e73", "hcattention": "#cc79a7", "infinigen": "#e69f00",
}  # fmt: skip
OTHERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
INK = "#1b1b1f"  # replaced by the page's text colour where a drawing is part of the page
PAPER: dict[str, Any] = {
    "facecolor": "none",
    "edgecolor": INK,
    "hatch": "////",
    "linewidth": 1.0,
}  # bars of the paper's numbers
PAPER_LINE: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 3)), "linewidth": 1.3}
HEAT = "cividis"


def figure(width: float = 7.2, height: float = 3.6, columns: int = 1) -> tuple[Figure, list[Axes]]:
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(drawn)
    drawn.patch.set_alpha(0.0)
    every = list(drawn.subplots(1, columns, squeeze=False).ravel())
    for axes in every:
        _style(axes)
    return drawn, every


def _style(axes: Axes) -> None:
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(INK)
        label.set_fontsize(10)
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)


def colour_of(name: str, place: int = 0) -> str:
    return COLOURS.get(name, OTHERS[place % len(OTHERS)])


def legend(axes: Axes, **more: Any) -> None:
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, **more)


def percent(axes: Axes, which: str = "y") -> None:
    """Label the ``x`` or ``y`` axis in percent. The plotted values are shares of 1."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _place: f"{100 * value:g} %"))


def whole_numbers(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def token_axis(axes: Axes, tokens: Sequence[int], text: str) -> None:
    axes.set_xticks(range(len(tokens)), [tokens_label(count) for count in tokens])
    axes.set_xlabel(text)


def grouped_bars(
    axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], labels: str = "{:.2f}"
) -> None:
    """Draw a group of bars per entry of ``groups`` and a bar per series in each group. None draws no bar."""
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(groups))]
        heights = [math.nan if value is None else value for value in values]
        look: dict[str, Any] = PAPER if "paper" in name.lower() else {"color": colour_of(name, number)}
        axes.bar(places, heights, width * 0.92, label=name, **look)
        if labels and len(groups) * len(series) <= 24:
            for place, height in zip(places, heights, strict=True):
                if not math.isnan(height):
                    axes.annotate(
                        labels.format(height), (place, max(height, 0)), xytext=(0, 2), textcoords="offset points",
                        ha="center", va="bottom", fontsize=7.5, color=INK,
                    )  # fmt: skip
    axes.set_xticks(range(len(groups)), list(groups))
    axes.margins(y=0.15)


def heat_map(
    axes: Axes, values: Sequence[Sequence[float | None]], rows: Sequence[str], columns: Sequence[str], *,
    low: float, high: float, form: str = "{:.2f}", colours: str = HEAT,
) -> AxesImage:  # fmt: skip
    """Draw ``values`` as coloured cells with numbers, None as an empty cell; return the image for ``colour_bar``."""
    grid = np.array([[math.nan if value is None else value for value in row] for row in values], dtype=float)
    image = axes.imshow(grid, cmap=colours, vmin=low, vmax=high, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), list(columns))
    axes.set_yticks(range(len(rows)), list(rows))
    for (row, column), value in np.ndenumerate(grid):
        if not math.isnan(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            axes.text(
                column,
                row,
                form.format(value),
                ha="center",
                va="center",
                fontsize=8.5,
                color="white" if dark else "black",
            )
    return image


def colour_bar(drawn: Figure, image: AxesImage, axes: Sequence[Axes], text: str) -> None:
    bar = drawn.colorbar(image, ax=list(axes), shrink=0.9)
    bar.set_label(text, color=INK, fontsize=9)
    bar.ax.tick_params(colors=INK, labelsize=8)
    bar.outline.set_edgecolor(INK)
