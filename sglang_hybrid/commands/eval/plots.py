"""Draws figures as PNG files, without pyplot: no display is needed, and no figure stays in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from sglang_hybrid.commands.eval.result import NeedleGrid, Run

_DPI = 150
_MOST_PANELS_IN_A_ROW = 3
_COLOURS = "cividis"  # readable without telling red from green
_BAR, _P95 = "#3b6ea5", "#c2571a"


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    return path


# -- needle ------------------------------------------------------------------------------------------------------------


def needle_heat_maps(path: Path, grids: Mapping[str, NeedleGrid]) -> Path:
    """Draw accuracy over depth and length, one panel per run, all with the same colours for 0 to 100 %."""
    if not grids:
        raise ValueError("no grid to draw")
    rows = math.ceil(len(grids) / _MOST_PANELS_IN_A_ROW)
    columns = math.ceil(len(grids) / rows)
    wide = max(2.2 + 0.62 * max(len(grid.lengths) for grid in grids.values()), 3.6)
    high = max(1.5 + 0.42 * max(len(grid.depths) for grid in grids.values()), 2.4)
    figure = _figure(columns * wide + 0.8, rows * high + 0.3)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, grid) in zip(panels, grids.items(), strict=False):
        image = _heat_map(axes, grid)
        axes.set_title(name, fontsize=11)
    for axes in panels[len(grids) :]:
        axes.set_axis_off()
    bar = figure.colorbar(image, ax=panels, shrink=0.85)
    bar.set_label("needles found (%)")
    return _save(figure, path)


def _heat_map(axes: Axes, grid: NeedleGrid) -> AxesImage:
    values = np.array([[math.nan if cell is None else cell for cell in row] for row in grid.accuracy])
    image = axes.imshow(100 * values, cmap=_COLOURS, vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(grid.lengths)), [tokens_label(length) for length in grid.lengths])
    axes.set_yticks(range(len(grid.depths)), [f"{depth:.0%}" for depth in grid.depths])
    axes.set_xlabel("prompt (tokens)")
    axes.set_ylabel("depth of the needle")
    for (row, column), value in np.ndenumerate(values):
        if not math.isnan(value):
            # dark text on the light half of the colours, light text on the dark half
            colour = "black" if value > 0.5 else "white"
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=9)
    return image


def tokens_label(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


# -- text --------------------------------------------------------------------------------------------------------------


def text_bars(path: Path, runs: Sequence[Run]) -> Path:
    """Draw each run's perplexity and its KL divergence from the first run: mean as a bar, 95th percentile as a mark."""
    if not runs:
        raise ValueError("no run to draw")
    figure = _figure(10.5, 1.4 + 0.45 * len(runs))
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(runs))
    perplexities = [_number(run.perplexity) for run in runs]
    _bars(left, perplexities, [_with_change(value, perplexities[0]) for value in perplexities])
    left.set_yticks(places, [run.name for run in runs])
    left.invert_yaxis()  # the first run on top
    left.set_xlabel("perplexity of decoded text")

    means, tails = [_number(run.kl_mean) for run in runs], [_number(run.kl_p95) for run in runs]
    # a label is to the right of bar and mark
    ends = [max(filter(math.isfinite, pair), default=math.nan) for pair in zip(means, tails, strict=True)]
    labels = [
        ", ".join(f"{value:.4f}" for value in pair if math.isfinite(value)) for pair in zip(means, tails, strict=True)
    ]
    _bars(right, means, labels, ends)
    right.plot(tails, places, "|", color=_P95, markersize=14, markeredgewidth=2)
    right.set_xlabel(f"KL divergence from {runs[0].name} (nats per token)\nbar: mean, mark: 95th percentile")
    return _save(figure, path)


def _number(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan


def _with_change(value: float, first: float) -> str:
    change = value / first - 1
    return f"{value:.3f}" if math.isnan(change) or change == 0 else f"{value:.3f} ({change:+.2%})"


def _bars(axes: Axes, values: Sequence[float], labels: Sequence[str], ends: Sequence[float] | None = None) -> None:
    """Draw bars with labels to the right of ``ends``, by default the bars' ends. Values that are NaN are left out."""
    axes.barh(range(len(values)), values, color=_BAR, height=0.6)
    ends = ends or values
    for place, (value, end, label) in enumerate(zip(values, ends, labels, strict=True)):
        if math.isfinite(value):
            axes.annotate(label, (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    longest = max(filter(math.isfinite, ends), default=0.0)
    axes.set_xlim(0, 1.4 * longest or 1.0)  # space for the labels
    axes.spines[["top", "right"]].set_visible(False)


# -- CPU ratio ---------------------------------------------------------------------------------------------------------


def ratio_curves(path: Path, steps: Sequence[int], curves: Mapping[str, Sequence[float]], beta: float) -> Path:
    """Draw mean CPU compute ratios (misses / budget) over decode steps, and a line at beta, where recall begins.

    After ScoutAttention's figure 6.
    """
    for name, values in curves.items():
        if len(values) != len(steps):
            raise ValueError(f"curve {name!r} has {len(values)} values for {len(steps)} steps")
    figure = _figure(7, 3.8)
    axes = figure.subplots()
    for name, values in curves.items():
        axes.plot(steps, [100 * value for value in values], label=name, linewidth=1.6)
    axes.axhline(100 * beta, color="black", linestyle="--", linewidth=1, label=f"beta = {100 * beta:g}%")
    axes.set_xlabel("decode step")
    axes.set_ylabel("mean CPU compute ratio (%)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return _save(figure, path)
