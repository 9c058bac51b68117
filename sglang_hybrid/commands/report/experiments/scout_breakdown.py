"""ScoutAttention, figure 11: breakdown of a decode step's time, and how long the GPU is idle."""

from __future__ import annotations

from typing import ClassVar

from sglang_hybrid.commands.report import figures
from sglang_hybrid.commands.report.content import Figure, Note, Table
from sglang_hybrid.commands.report.context import STOCK, Context
from sglang_hybrid.commands.report.experiments.base import Experiment, Result, Shown, cited, percent, shown
from sglang_hybrid.commands.report.experiments.speeds import speed_notes, speed_settings_lines, speeds_of
from sglang_hybrid.commands.report.paper_numbers import SCOUT_IDLE

_POLICIES = (STOCK, "scout", "scoutattention", "hgca", "infinigen")


class ScoutBreakdown(Experiment):
    name = "scout-breakdown"
    title = "Where a decode step's time goes"
    paper = "ScoutAttention"
    question = "How long does the GPU wait for the CPU or for PCIe?"
    numbers: ClassVar = ("batches", "batch_length", "speed_budget", "speed_steps", "warm_steps", "rate_window")
    uses = "speed"

    def run(self, context: Context) -> Result:
        return speeds_of(context, _POLICIES)

    def draw(self, result: Result) -> Shown:
        found = {one["policy"]: one["breakdown"] for one in result["speeds"]}
        parts = list(dict.fromkeys(part for one in found.values() for part in one["parts"]))
        drawn, (left, right) = figures.figure(9.6, 3.4, 2)
        bottom = [0.0] * len(found)
        for number, part in enumerate(parts):
            values = [one["parts"].get(part, 0.0) / one["step_ms"] for one in found.values()]
            left.bar(range(len(found)), values, 0.62, bottom=bottom, label=part, color=figures.OTHERS[number % 7])
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        left.set_xticks(range(len(found)), list(found), fontsize=8)
        left.set_ylabel("share of a decode step")
        figures.percent(left)
        left.set_ylim(0, 1.32)
        left.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
        figures.legend(left, ncols=3, loc="upper center")
        series: dict[str, list[float | None]] = {"paper, batch 40": [number.value for number in SCOUT_IDLE.values()]}
        if result["has_gpu"]:
            series["this machine"] = [(found.get(name) or {}).get("idle_share") for name in SCOUT_IDLE]
        figures.grouped_bars(right, list(SCOUT_IDLE), series, "{:.0%}")
        right.set_ylabel("GPU idle (share of a step)")
        figures.percent(right)
        figures.legend(right)
        rows = tuple(
            (
                policy, one["engine"], shown(one["step_ms"], "{:.1f}"),
                *(shown(one["parts"].get(part), "{:.1f}") for part in parts), percent(one["idle_share"]),
            )
            for policy, one in found.items()
        )  # fmt: skip
        first = next(iter(found.values()))
        caption = f"{first['rows']} rows of {first['length']} tokens. Hatched: the paper."
        idle = (
            "Idle is not defined on a host without a GPU: nothing waits for another device."
            if not result["has_gpu"]
            else (
                "Idle: no kernel ran, or none but waits for the worker and copies over PCIe. Parts "
                "are the time in which "
                "nothing of another kind ran."
            )
        )
        return Shown(
            (
                Figure("scout-breakdown", caption, drawn),
                Table("Milliseconds of a step", ("", "engine", "step", *parts, "GPU idle"), rows),
                Note(f"{idle} {cited(SCOUT_IDLE.values())}"),
                *speed_notes(result),
            ),
            speed_settings_lines(result),
        )
