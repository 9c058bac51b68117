"""ScoutAttention, figure 9: decode throughput by batch."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from sglang_hybrid.commands.report import figures
from sglang_hybrid.commands.report.content import Figure, Note, Table
from sglang_hybrid.commands.report.context import Context
from sglang_hybrid.commands.report.experiments.base import Experiment, Result, Shown, cited, shown
from sglang_hybrid.commands.report.experiments.speeds import (
    PAPERS,
    rate_at,
    speed_notes,
    speed_settings_lines,
    speeds_of,
)  # fmt: skip
from sglang_hybrid.commands.report.paper_numbers import SCOUT_BATCH_SCALING, SCOUT_BATCHES


class ScoutBatch(Experiment):
    name = "scout-batch"
    title = "Decode throughput by batch"
    paper = "ScoutAttention"
    question = "Does throughput grow with the batch?"
    numbers: ClassVar = ("batches", "batch_length", "speed_budget", "speed_steps", "warm_steps", "rate_window")
    uses = "speed"

    def run(self, context: Context) -> Result:
        size = context.size
        return {"batches": size.batches, "length": size.batch_length, **speeds_of(context, PAPERS)}

    def draw(self, result: Result) -> Shown:
        batches, length = result["batches"], result["length"]
        rates = {one["policy"]: [rate_at(one, length, rows) for rows in batches] for one in result["speeds"]}
        drawn, (left, right) = figures.figure(9.6, 3.6, 2)
        figures.grouped_bars(left, [str(rows) for rows in batches], rates, "{:.3g}")
        left.set_xlabel(f"rows of {length} tokens")
        left.set_ylabel("decode throughput (tokens/s)")
        figures.legend(left)
        steps = [f"{small} → {large}" for small, large in pairwise(batches)]
        ours = {
            policy: [large / small if small and large else None for small, large in pairwise(values)]
            for policy, values in rates.items()
        }
        groups = [*steps, *(f"paper {small} → {large}" for small, large in SCOUT_BATCH_SCALING)]
        for number, (policy, values) in enumerate(ours.items()):
            right.plot(
                range(len(steps)), [float("nan") if one is None else one for one in values], "o-",
                color=figures.colour_of(policy, number), label=policy, linewidth=1.4,
            )  # fmt: skip
        for place, of_policy in enumerate(SCOUT_BATCH_SCALING.values(), len(steps)):
            for policy, of_paper in of_policy.items():
                right.plot(
                    place, of_paper.value, "D", markerfacecolor="none", markeredgecolor=figures.colour_of(policy)
                )
                right.annotate(
                    f"{policy} {of_paper.value:g}", (place, of_paper.value), xytext=(6, -3), textcoords="offset points",
                    fontsize=7.5, color=figures.INK,
                )  # fmt: skip
        right.set_xticks(range(len(groups)), groups, fontsize=8)
        right.set_xlim(-0.4, len(groups) - 0.2 + 0.5)
        right.set_ylabel("gain over the smaller batch")
        figures.legend(right)
        table = tuple((policy, *(shown(value, "{:.1f}") for value in values)) for policy, values in rates.items())
        numbers = [number for of_policy in SCOUT_BATCH_SCALING.values() for number in of_policy.values()]
        return Shown(
            (
                Figure(
                    "scout-batch", "Left: this machine. Right: scaling, the paper's values as open diamonds.", drawn
                ),
                Table("Tokens per second", ("", *(f"{rows} rows" for rows in batches)), table),
                *speed_notes(result),
                Note(
                    f"The paper has batches of {', '.join(map(str, SCOUT_BATCHES))} at 32k tokens; "
                    "--size full has the same. " + cited(numbers)
                ),
            ),
            speed_settings_lines(result),
        )
