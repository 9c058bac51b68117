"""ScoutAttention, figure 7: accuracy by budget."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang_hybrid.commands.report import figures
from sglang_hybrid.commands.report.content import Figure, Note, Table
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
    score_of,
    settings_lines,
    shown,
)  # fmt: skip
from sglang_hybrid.commands.report.experiments.scout_ratio import SCOUTS, text_settings
from sglang_hybrid.commands.report.paper_numbers import SCOUT_ACCURACY_LOSS

_POLICIES = ("scoutattention", "scout")
_TASKS = ("needle", "lines")


class ScoutAccuracy(Experiment):
    name = "scout-accuracy"
    title = "Accuracy by budget"
    paper = "ScoutAttention"
    question = "What does a budget below the context cost in perplexity and in retrieval?"
    numbers: ClassVar = ("windows", "prompt_tokens", "decode_tokens", "budgets", "lengths", "depths", "repeats")

    def run(self, context: Context) -> Result:
        size = context.size
        variants: Variants = [
            (f"{policy}, {budget}", [f"policy={policy}", f"budget_tokens={budget}", "prediction=raw"])
            for policy in _POLICIES
            for budget in size.budgets
        ]
        session = context.session(text_settings(context), variants=SCOUTS)
        asked = {
            "windows": size.windows, "prompt_tokens": size.prompt_tokens, "decode_tokens": size.decode_tokens,
            "lengths": size.lengths[-1:], "depths": size.depths, "repeats": size.repeats, "tasks": _TASKS,
        }  # fmt: skip
        found = context.ask(session, "evaluate", variants=variants, **asked)
        return {"prompt_tokens": size.prompt_tokens, "length": size.lengths[-1], "budgets": size.budgets, **found}

    def draw(self, result: Result) -> Shown:
        runs = {run["name"]: run for run in result["runs"]}
        baseline, budgets = result["runs"][0], result["budgets"]
        drawn, (left, right) = figures.figure(9.6, 3.4, 2)
        for policy in _POLICIES:
            at = [(n, runs[f"{policy}, {budget}"]) for n, budget in enumerate(budgets) if f"{policy}, {budget}" in runs]
            look: dict[str, Any] = {
                "color": figures.colour_of(policy),
                "marker": "o",
                "label": policy,
                "linewidth": 1.6,
            }
            changes = [(run["perplexity_change"] or {}).get("mean") for _, run in at]
            left.plot([n for n, _ in at], [float("nan") if one is None else one for one in changes], **look)
            scores = [score for _, run in at if (score := _score(run)) is not None]
            if len(scores) == len(at):
                right.plot([n for n, _ in at], scores, **look)
        left.axhline(0, color=figures.colour_of("full"), linewidth=1.2, label="full attention")
        left.set_ylabel("perplexity against full attention")
        figures.percent(left)
        if (full := _score(baseline)) is not None:
            right.axhline(full, color=figures.colour_of("full"), linewidth=1.2, label="full attention")
            right.set_ylim(-0.03, 1.05)
        right.set_ylabel("retrieval answers found")
        figures.percent(right)
        for axes in (left, right):
            figures.token_axis(axes, budgets, "budget (tokens)")
            figures.legend(axes)
        rows = tuple(
            (
                run["name"], shown(run["perplexity"]), change_of(run), shown(run["kl_mean"], "{:.4f}"),
                percent(run["top1_agreement"]), *(percent(score_of(run, task), "{:.0f} %") for task in _TASKS),
            )
            for run in result["runs"]
        )  # fmt: skip
        head = ("run, budget", "perplexity", "change [95 %]", "KL, nats", "same first choice", *_TASKS)
        of_paper = tuple(
            (str(budget), f"-{100 * number.value:g} %", str(number.source))
            for budget, number in SCOUT_ACCURACY_LOSS.items()
        )
        where = f"perplexity behind {result['prompt_tokens']} tokens, retrieval at {result['length']} tokens"
        return Shown(
            (
                Figure("scout-accuracy", f"By budget; {where}.", drawn),
                Table("This model", head, rows),
                Table("The paper: LongBench against full attention, Qwen3-8B", ("budget", "mean", "source"), of_paper),
                *refused_notes(result),
                Note(
                    "The paper's scores are LongBench's, of another model, at up to 64k tokens: they "
                    "are to be read beside "
                    "ours, not against them. " + cited(SCOUT_ACCURACY_LOSS.values())
                ),
            ),
            settings_lines(result["runs"]),
        )


def _score(run: Result) -> float | None:
    """Return the mean score of the retrieval tasks in a run, or None if the run has none."""
    scores = [score for task in _TASKS if (score := score_of(run, task)) is not None]
    return sum(scores) / len(scores) if scores else None
