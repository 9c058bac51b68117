"""Draw README's first chart: throughput and accuracy of the same settings on a real model, from two result files.

    python -m bench.headline [--throughput FILE] [--ruler FILE] [--out FILE.png]

`--throughput` is a result of ``bench.throughput`` with runs `stock` and `hybrid`. `--ruler` is ``bars.json`` of
``bench.served_ruler``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.record import RESULTS
from bench.side_by_side.claims import best, lengths_of, tokens_label
from bench.side_by_side.plots import COLOURS, DPI, empty_figure

_RULER_RUNS = {"stock": "stock", "budget-2048": "hybrid"}


def draw(throughput: dict[str, Any], ruler: dict[str, Any], path: Path) -> Path:
    points, runs = throughput["points"], ruler["runs"]
    lengths, asked = lengths_of(points), sorted(map(int, runs["stock"]))
    figure = empty_figure(7.6, 2.8)
    fast, right = figure.subplots(1, 2, width_ratios=[len(lengths) + 1, len(asked) + 1])
    rates = {name: [best(points, name, length) for length in lengths] for name in COLOURS}
    for name, found in rates.items():
        heights = [one["tokens_per_s"] if one else 0.0 for one in found]
        told = [f"{one['tokens_per_s']:,.0f}\n{one['rows']} requests" if one else "" for one in found]
        _bars(fast, name, heights, told)
    fast.set_xticks(range(len(lengths)), [tokens_label(length) for length in lengths])
    fast.set_ylabel("decode tokens/s", fontsize=9)
    fast.margins(y=0.3)
    for run, name in _RULER_RUNS.items():
        means = [runs[run][str(length)]["mean"] for length in asked]
        _bars(right, name, means, [f"{mean:.1f}" for mean in means])
    right.set_xticks(range(len(asked)), [tokens_label(length) for length in asked])
    right.set_ylabel("RULER, mean of 13 tasks", fontsize=9)
    right.set_ylim(0, 100)
    for axes in (fast, right):
        axes.set_xlabel("tokens of a prompt", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    fast.legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path, dpi=DPI)
    return path


def _bars(axes: Any, name: str, heights: list[float], told: list[str]) -> None:
    offset = -0.2 if name == "stock" else 0.2
    places = [place + offset for place in range(len(heights))]
    bars = axes.bar(places, heights, 0.38, color=COLOURS[name], label=name)
    axes.bar_label(bars, told, padding=2, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--throughput", type=Path, default=RESULTS / "qwen-throughput.json")
    parser.add_argument("--ruler", type=Path, default=RESULTS / "qwen-ruler-bars.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "headline.png")
    args = parser.parse_args()
    print(draw(json.loads(args.throughput.read_text()), json.loads(args.ruler.read_text()), args.out))


if __name__ == "__main__":
    main()
