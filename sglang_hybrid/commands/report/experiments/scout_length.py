"""ScoutAttention, figure 8: decode throughput by input length."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang_hybrid.commands.report import figures
from sglang_hybrid.commands.report.content import Figure, Note, Table
from sglang_hybrid.commands.report.context import STOCK, Context
from sglang_hybrid.commands.report.experiments.base import Experiment, Result, Shown, cited, shown
from sglang_hybrid.commands.report.experiments.speeds import (
    PAPERS,
    rate_at,
    speed_notes,
    speed_settings_lines,
    speeds_of,
)  # fmt: skip
from sglang_hybrid.commands.report.paper_numbers import SCOUT_SPEED_UP_64K, SCOUT_SPEED_UP_OTHERS


class ScoutLength(Experiment):
    name = "scout-length"
    title = "Decode throughput by input length"
    paper = "ScoutAttention"
    question = "How fast are decode steps behind longer and longer prompts?"
    numbers: ClassVar = ("speed_lengths", "speed_rows", "speed_budget", "speed_steps", "warm_steps", "rate_window")
    uses = "speed"

    def run(self, context: Context) -> Result:
        size = context.size
        return {
            "lengths": size.speed_lengths,
            "rows": size.speed_rows,
            "budget": size.speed_budget,
            **speeds_of(context, PAPERS),
        }

    def draw(self, result: Result) -> Shown:
        lengths, rows = result["lengths"], result["rows"]
        drawn, (left, right) = figures.figure(9.6, 3.6, 2)
        rates = {one["policy"]: [rate_at(one, length, rows) for length in lengths] for one in result["speeds"]}
        for number, (policy, values) in enumerate(rates.items()):
            known = [float("nan") if value is None else value for value in values]
            look: dict[str, Any] = {
                "color": figures.colour_of(policy, number),
                "marker": "o",
                "label": policy,
                "linewidth": 1.6,
            }
            left.plot(range(len(lengths)), known, **look)
            if STOCK in rates and policy != STOCK:
                over = [
                    value / stock if value and stock else float("nan")
                    for value, stock in zip(values, rates[STOCK], strict=True)
                ]
                right.plot(range(len(lengths)), over, **look)
        left.set_ylabel("decode throughput (tokens/s)")
        left.set_ylim(bottom=0)
        right.axhline(1, color=figures.colour_of(STOCK), linewidth=1.2)
        right.axhline(
            SCOUT_SPEED_UP_64K.value,
            label="paper: 5.1 at 64k, Qwen3-14B",
            **figures.PAPER_LINE,
        )
        right.set_ylabel("times stock SGLang")
        right.set_ylim(bottom=0)
        for axes in (left, right):
            figures.token_axis(axes, lengths, f"input (tokens), {rows} row{'s' if rows > 1 else ''}")
            figures.legend(axes)
        table = tuple((policy, *(shown(value, "{:.1f}") for value in values)) for policy, values in rates.items())
        return Shown(
            (
                Figure("scout-length", f"Median of decode steps, budget {result['budget']} tokens.", drawn),
                Table("Tokens per second", ("", *(f"{length} tokens" for length in lengths)), table),
                *speed_notes(result),
                Note(
                    "The paper's throughput is that of the largest batch that fits in GPU memory, "
                    "which is what an offloaded "
                    f"cache gains by; at 64k it is {SCOUT_SPEED_UP_64K.value:g} times full attention's and up to "
                    f"{SCOUT_SPEED_UP_OTHERS.value:g} times that of HGCA and InfiniGen. "
                    + cited([SCOUT_SPEED_UP_64K, SCOUT_SPEED_UP_OTHERS])
                ),
            ),
            speed_settings_lines(result),
        )
