"""ScoutAttention, figure 12: ablation, the contribution of each part of the policy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

from sglang_hybrid.commands.report import figures
from sglang_hybrid.commands.report.content import Element, Figure, Note, Table
from sglang_hybrid.commands.report.context import Context
from sglang_hybrid.commands.report.experiments.base import (
    Experiment,
    Result,
    Shown,
    Variants,
    change_of,
    cited,
    percent,
    refused_notes,
    settings_lines,
    shown,
)  # fmt: skip
from sglang_hybrid.commands.report.experiments.scout_ratio import SCOUTS, text_settings
from sglang_hybrid.commands.report.paper_numbers import SCOUT_ABLATION

_STEPS = {  # settings of scout whose speed is compared on a GPU; the names say what each step adds
    "real queries, no recall": ("prediction=none", "scout.recall_interval=0"),
    "+ prediction": ("prediction=raw", "scout.recall_interval=0"),
    "+ recall": ("prediction=raw",),
}


class ScoutAblation(Experiment):
    name = "scout-ablation"
    title = "Ablation"
    paper = "ScoutAttention"
    question = "What do prediction, calibration, recall and sketches contribute?"
    numbers: ClassVar = ("windows", "prompt_tokens", "decode_tokens", "budget", "calibrates")

    def run(self, context: Context) -> Result:
        size = context.size
        shared = ["policy=scout", f"budget_tokens={size.budget}"]
        calibrated = [*shared, "prediction=calibrated", "profile=auto"]
        variants: Variants = [
            ("real query", [*shared, "prediction=none"]),
            ("predicted, raw", [*shared, "prediction=raw"]),
            *([("predicted, calibrated", calibrated)] if size.calibrates else []),
            ("raw, no recall", [*shared, "prediction=raw", "scout.recall_interval=0"]),
            ("raw, recall at every step", [*shared, "prediction=raw", "scout.recall_interval=1"]),
            ("raw, no resident bonus", [*shared, "prediction=raw", "scout.resident_bonus=0"]),
            *([] if context.has_gpu else [("raw, no sketches", [*shared, "prediction=raw", "sketch_channels=0"])]),
            ("the paper's rules", ["policy=scoutattention", f"budget_tokens={size.budget}", "prediction=raw"]),
        ]
        session = context.session(text_settings(context), variants=SCOUTS)
        asked = {"windows": size.windows, "prompt_tokens": size.prompt_tokens, "decode_tokens": size.decode_tokens}
        found = context.ask(session, "evaluate", variants=variants, **asked)
        speeds = self._speeds(context) if context.has_gpu else {}
        return {"prompt_tokens": size.prompt_tokens, "budget": size.budget, "speeds": speeds, **found}

    def _speeds(self, context: Context) -> dict[str, float | None]:
        size, found = context.size, {}
        point = [size.batch_length, max(size.batches)]
        for name, settings in _STEPS.items():
            every = [f"budget_tokens={size.speed_budget}", "whole_requests=never", "scout.cpu_share=1", *settings]
            session = context.served("scout", ["policy=scout", *every])
            steps = {"steps": size.speed_steps, "warm_steps": size.warm_steps}
            found[name] = context.ask(session, "speed", points=[point], **steps)["points"][0].get("tokens_per_s")
        return found

    def draw(self, result: Result) -> Shown:
        runs: list[dict[str, Any]] = result["runs"][1:]
        drawn, (left, right) = figures.figure(9.6, 0.9 + 0.34 * len(runs), 2)
        places = range(len(runs))
        colours = [
            figures.colour_of("scoutattention" if run["name"].startswith("the paper") else "scout") for run in runs
        ]
        for axes, key, text in (
            (left, "kl_mean", "KL to full attention (nats per token)"),
            (right, "cpu_ratio", "CPU compute ratio"),
        ):
            values = [run[key] or 0.0 for run in runs]
            axes.barh(places, values, 0.62, color=colours)
            for place, value in enumerate(values):
                label = f"{value:.4f}" if axes is left else percent(value)
                axes.annotate(
                    label,
                    (value, place),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                    color=figures.INK,
                )
            axes.set_xlabel(text)
            axes.margins(x=0.2)
            axes.grid(visible=False)
        left.set_yticks(places, [run["name"] for run in runs])
        right.set_yticks(places, [""] * len(runs))
        left.invert_yaxis()
        right.invert_yaxis()
        figures.percent(right, "x")
        rows = tuple(
            (run["name"], shown(run["perplexity"]), change_of(run), shown(run["kl_mean"], "{:.4f}"),
             percent(run["top1_agreement"]), percent(run["cpu_ratio"]))
            for run in result["runs"]
        )  # fmt: skip
        head = ("run", "perplexity", "change [95 %]", "KL, nats", "same first choice", "CPU compute ratio")
        where = f"behind {result['prompt_tokens']} tokens, budget {result['budget']} tokens"
        elements: list[Element] = [
            Figure("scout-ablation", f"Accuracy and CPU work, {where}.", drawn),
            Table("Accuracy", head, rows),
        ]
        elements += [*_speed_elements(result), *refused_notes(result)]
        return Shown(tuple(elements), settings_lines(result["runs"]))


def _speed_elements(result: Result) -> list[Element]:
    paper = " ".join(f"{name} {number.value:g} times," for name, number in SCOUT_ABLATION.items()).rstrip(",")
    said = f"The paper's ablation is of throughput: {paper}. {cited(SCOUT_ABLATION.values())}"
    if not result["speeds"]:
        said += (
            " Without a GPU there is nothing to overlap, so that only accuracy and the CPU's share are compared here."
        )
        return [Note(said)]
    names = list(result["speeds"])
    values = [result["speeds"][name] for name in names]
    gains = [None, *(new / old if old and new else None for old, new in pairwise(values))]
    of_paper = [None, *(number.value for number in SCOUT_ABLATION.values())]
    rows = tuple(
        (name, shown(value, "{:.0f}"), shown(gain, "{:.2f}"), shown(paper_gain, "{:.2f}"))
        for name, value, gain, paper_gain in zip(names, values, gains, of_paper, strict=True)
    )
    return [Table("Decode throughput", ("", "tokens/s", "gain", "paper's gain"), rows), Note(said)]
