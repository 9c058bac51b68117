"""HCAttention, figure 2: a needle over depth and context length."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang_hybrid.commands.eval.plots import tokens_label
from sglang_hybrid.commands.report import figures
from sglang_hybrid.commands.report.content import Figure, Note, Table
from sglang_hybrid.commands.report.context import Context
from sglang_hybrid.commands.report.experiments.base import (
    Experiment,
    Result,
    Shown,
    Variants,
    percent,
    refused_notes,
    score_of,
    settings_lines,
)  # fmt: skip
from sglang_hybrid.commands.report.experiments.scout_ratio import text_settings
from sglang_hybrid.commands.report.paper_numbers import HC_LONGBENCH, HC_LONGBENCH_SOURCE


class HcNeedle(Experiment):
    name = "hc-needle"
    title = "Needle in a haystack"
    paper = "HCAttention"
    question = "Is one sentence found at every depth of every length?"
    numbers: ClassVar = ("lengths", "depths", "repeats", "budget")
    uses = "codes"

    def missing(self, context: Context) -> str | None:
        return None if context.model.has_tokenizer else "the model has no tokenizer to ask with"

    def run(self, context: Context) -> Result:
        size = context.size
        variants: Variants = [("scout", ["policy=scout", f"budget_tokens={size.budget}", "prediction=none"])]
        settings, policies = text_settings(context), ["scout"]
        if "hcattention" in context.policies:
            codebook = next((str(path) for path in context.codebooks.values()), "none")
            settings = ["policy=hcattention", f"hcattention.codebook={codebook}"]
            # scout is left out: it needs digests, and a pool for hcattention has codes of keys but no digests
            variants = [("hcattention", [*settings, "hcattention.tau=0.9"])]
            policies = ["hcattention"]
        session = context.session(settings, variants=policies)
        asked = {"lengths": size.lengths, "depths": size.depths, "repeats": size.repeats, "tasks": ["needle"]}
        return {"budget": size.budget, **context.ask(session, "evaluate", variants=variants, **asked)}

    def draw(self, result: Result) -> Shown:
        runs: list[dict[str, Any]] = [run for run in result["runs"] if run["needle"]]
        drawn, panels = figures.figure(3.9 * len(runs) + 1.2, 3.2, len(runs))
        for axes, run in zip(panels, runs, strict=True):
            grid = run["needle"]
            values = [[None if cell is None else 100 * cell for cell in row] for row in grid["accuracy"]]
            depths, lengths = (
                [f"{depth:.0%}" for depth in grid["depths"]],
                [tokens_label(length) for length in grid["lengths"]],
            )
            image = figures.heat_map(axes, values, depths, lengths, low=0, high=100, form="{:.0f}")
            axes.set_title(run["name"], fontsize=10, color=figures.INK)
            axes.set_xlabel("prompt (tokens)")
            axes.set_ylabel("depth of the needle")
        figures.colour_bar(drawn, image, panels, "needles found (%)")
        rows = tuple(
            (run["name"], percent(score_of(run, "needle"), "{:.0f} %"), str(run["tasks"]["needle"]["prompts"]))
            for run in runs
        )
        of_paper = tuple(
            (model, *(f"{score:g}" for score in scores.values())) for model, scores in HC_LONGBENCH.items()
        )
        head = ("model", *next(iter(HC_LONGBENCH.values())))
        return Shown(
            (
                Figure("hc-needle", "Needles found by depth and length.", drawn),
                Table("All cells together", ("run", "found", "prompts"), rows),
                Table(f"LongBench by share of the KV cache on the GPU ({HC_LONGBENCH_SOURCE})", head, of_paper),
                *refused_notes(result),
                Note(
                    "The paper draws its needle maps without numbers (figure 2): like full attention "
                    "at 50 % and 25 % of the KV "
                    "cache, slightly worse at 12.5 %."
                ),
            ),
            settings_lines(result["runs"]),
        )  # fmt: skip
