"""Draws figures of a result as PNG files. Without pyplot: no display is needed, and no figure stays in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.side_by_side.claims import best, lengths_of, speed_ups, tokens_label

DPI = 150
COLOURS = {"stock": "#8a8a8a", "hybrid": "#3b6ea5"}
_CATEGORY_COLOURS = "cividis"  # readable without telling red from green


def draw(result: dict[str, Any], beside: Path) -> list[Path]:
    """Write figures next to the result file ``beside`` and return their paths: throughput, speed-up, breakdown."""
    written = [_throughput(result, beside.with_name(f"{beside.stem}-throughput.png"))]
    if ratios := speed_ups(result["points"]):
        written.append(_speed_up(ratios, beside.with_name(f"{beside.stem}-speedup.png")))
    if any(one.get("breakdown", {}).get("categories") for one in result["points"]):
        written.append(_breakdown(result, beside.with_name(f"{beside.stem}-breakdown.png")))
    return written


def empty_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _throughput(result: dict[str, Any], path: Path) -> Path:
    """Draw the best batch of each side against input length, and the ablation, if there is one, beside it."""
    points = result["points"]
    lengths = lengths_of(points)
    panels = 2 if result["ablation"] else 1
    figure = empty_figure(1.5 + 4.5 * panels, 3.8)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for offset, (name, colour) in zip((-0.2, 0.2), COLOURS.items(), strict=True):
        found = [(place, best(points, name, length)) for place, length in enumerate(lengths)]
        there = [(place + offset, one) for place, one in found if one]
        heights = [one["tokens_per_s"] for _, one in there]
        spread = [
            [one["tokens_per_s"] - one["tokens_per_s_p10"] for _, one in there],
            [one["tokens_per_s_p90"] - one["tokens_per_s"] for _, one in there],
        ]
        axes[0].bar([place for place, _ in there], heights, 0.38, yerr=spread, color=colour, label=name, capsize=3)
        for place, one in there:
            axes[0].annotate(
                f"{one['rows']} rows", (place, one["tokens_per_s_p90"]), xytext=(0, 6), textcoords="offset points",
                ha="center", fontsize=8,
            )  # fmt: skip
    axes[0].set_xticks(range(len(lengths)), [tokens_label(length) for length in lengths])
    axes[0].set_xlabel("input (tokens)")
    axes[0].set_ylabel("decode throughput (tokens/s)")
    axes[0].set_title("best batch in the same GPU memory", fontsize=10)
    axes[0].legend(frameon=False)
    if result["ablation"]:
        runs = result["ablation"]
        axes[1].bar(range(len(runs)), [one["tokens_per_s"] for one in runs], 0.6, color=COLOURS["hybrid"])
        axes[1].set_xticks(range(len(runs)), [one["part"] for one in runs], fontsize=8)
        axes[1].set_title(f"{tokens_label(runs[0]['length'])}, {runs[0]['rows']} rows", fontsize=10)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.margins(y=0.15)
    figure.savefig(path, dpi=DPI)
    return path


def _speed_up(ratios: list[dict[str, Any]], path: Path) -> Path:
    """Draw one bar for each input length: decode throughput of hybrid over stock, best batch of each."""
    figure = empty_figure(4.8, 2.4)
    axes = figure.subplots()
    bars = axes.bar(range(len(ratios)), [one["speed_up"] for one in ratios], 0.6, color=COLOURS["hybrid"])
    axes.bar_label(bars, [f"{one['speed_up']:.1f}x" for one in ratios], padding=2)
    axes.axhline(1, color=COLOURS["stock"], linestyle="--", linewidth=1)
    batches = [f"{tokens_label(one['length'])}\n{one['stock_rows']} -> {one['hybrid_rows']} requests" for one in ratios]
    axes.set_xticks(range(len(ratios)), batches, fontsize=8)
    axes.set_ylabel("throughput / stock", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    figure.savefig(path, dpi=DPI)
    return path


def _breakdown(result: dict[str, Any], path: Path) -> Path:
    """Draw stacked bars: the time in which only one category runs, in which several run, and idle time."""
    from matplotlib import colormaps

    profiled = [one for one in result["points"] if one.get("breakdown", {}).get("categories")]
    names = list(dict.fromkeys(name for one in profiled for name in one["breakdown"]["categories"]))
    figure = empty_figure(2.5 + 1.6 * len(profiled), 4)
    axes = figure.subplots()
    colours = colormaps[_CATEGORY_COLOURS].resampled(len(names) + 1)
    below = [0.0] * len(profiled)

    def add(label: str, heights: list[float], colour: Any) -> None:
        axes.bar(range(len(profiled)), heights, 0.6, bottom=below, label=label, color=colour)
        below[:] = [one + more for one, more in zip(below, heights, strict=True)]

    for index, name in enumerate(names):
        alone = [one["breakdown"]["categories"].get(name, {}).get("alone_ms", 0.0) for one in profiled]
        add(name, alone, colours(index))
    idle = [one["breakdown"]["idle_ms"] for one in profiled]
    steps = [one["breakdown"]["step_ms"] for one in profiled]
    add("several at once", [s - i - b for s, i, b in zip(steps, idle, below, strict=True)], "#c2571a")
    add("idle", idle, "#e6e6e6")
    labels = [f"{one['configuration']}\n{tokens_label(one['length'])} x {one['rows']}" for one in profiled]
    axes.set_xticks(range(len(profiled)), labels, fontsize=8)
    axes.set_ylabel("ms of a step, while profiled")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=DPI)
    return path
