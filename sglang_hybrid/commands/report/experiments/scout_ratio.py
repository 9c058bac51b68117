"""ScoutAttention, figure 6: the CPU compute ratio over decode steps."""

from __future__ import annotations

from typing import ClassVar

from sglang_hybrid.commands.report import figures
from sglang_hybrid.commands.report.content import Figure, Note, Table
from sglang_hybrid.commands.report.context import Context
from sglang_hybrid.commands.report.experiments.base import (
    Experiment,
    Result,
    Shown,
    Variants,
    cited,
    percent,
    settings_lines,
)
from sglang_hybrid.commands.report.paper_numbers import SCOUT_RATIO_MEAN, SCOUT_RATIO_THRESHOLD, SCOUT_RECALL_INTERVAL

# policies that the experiments with texts compare in one session
SCOUTS = ("scout", "scoutattention")
OFF, ON, OURS_OFF, OURS = "scoutattention, no recall", "scoutattention", "scout, no recall", "scout"


class ScoutRatio(Experiment):
    name = "scout-ratio"
    title = "CPU compute ratio over decode steps"
    paper = "ScoutAttention"
    question = "How much of the budget does the CPU compute, and does recall keep it low?"
    numbers: ClassVar = ("windows", "prompt_tokens", "budget", "ratio_steps")

    def run(self, context: Context) -> Result:
        size = context.size
        budget = [f"budget_tokens={size.budget}", "prediction=raw"]
        variants: Variants = [
            (OFF, ["policy=scoutattention", *budget, "scoutattention.recall_interval=0"]),
            (ON, ["policy=scoutattention", *budget]),
            (OURS_OFF, ["policy=scout", *budget, "scout.recall_interval=0"]),
            (OURS, ["policy=scout", *budget]),
        ]
        variants = [one for one in variants if one[1][0].partition("=")[2] in context.policies]
        session = context.session(text_settings(context), variants=SCOUTS)
        numbers = {"windows": size.windows, "prompt_tokens": size.prompt_tokens, "decode_tokens": size.ratio_steps}
        return {**numbers, "budget": size.budget, **context.ask(session, "ratios", variants=variants, **numbers)}

    def draw(self, result: Result) -> Shown:
        drawn, (axes,) = figures.figure()
        for number, run in enumerate(result["runs"]):
            steps = [step for step, value in enumerate(run["by_step"], 1) if value is not None]
            values = [value for value in run["by_step"] if value is not None]
            own = run["name"].partition(",")[0]
            line = "-" if own == run["name"] else ":"
            axes.plot(steps, values, line, color=figures.colour_of(own, number), label=run["name"], linewidth=1.6)
        axes.axhline(SCOUT_RATIO_THRESHOLD.value, label="paper: threshold 12 %", **figures.PAPER_LINE)
        axes.axhline(
            SCOUT_RATIO_MEAN.value,
            label="paper: mean with recall 8.2 %",
            color=figures.INK,
            linestyle=":",
            linewidth=1.2,
        )
        axes.set_xlabel("decode step")
        figures.whole_numbers(axes)
        axes.set_ylabel("CPU compute ratio (misses / budget)")
        axes.set_ylim(bottom=0)
        figures.percent(axes)
        figures.legend(axes, ncols=2)
        rows = tuple((run["name"], percent(run["mean"]), _last(run["by_step"])) for run in result["runs"])
        rows += (("paper, with recall (Qwen3-8B)", percent(SCOUT_RATIO_MEAN.value), ""),)
        where = f"{result['windows']} texts, {result['prompt_tokens']} tokens before, budget {result['budget']} tokens"
        return Shown(
            (
                Figure("scout-ratio", f"Mean over all layers, {where}. Dashed and dotted: the paper's numbers.", drawn),
                Table("CPU compute ratio", ("run", "mean", "last eighth of the steps"), rows),
                Note(
                    "A policy that resumes with an exact first step has no ratio there. The paper's "
                    "mean interval between "
                    f"recalls is {SCOUT_RECALL_INTERVAL.value:g} steps, profiled per layer; here it "
                    "is 8 without a profile. "
                    + cited([SCOUT_RATIO_MEAN, SCOUT_RATIO_THRESHOLD])
                ),
            ),
            settings_lines(result["runs"]),
        )  # fmt: skip


def _last(by_step: list[float | None]) -> str:
    values = [value for value in by_step[-max(1, len(by_step) // 8) :] if value is not None]
    return percent(sum(values) / len(values) if values else None)


def text_settings(context: Context) -> list[str]:
    """Return the settings with which accuracy experiments load the model.

    They name the largest budget, because kernels get the maximum length of a list when the model is loaded.
    """
    return [f"budget_tokens={max(context.size.budget, *context.size.budgets)}", "prediction=none"]
