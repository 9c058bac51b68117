"""HCAttention, tables 4a and 4b: centroids of a codebook and groups of a key."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang_hybrid.commands.report import figures
from sglang_hybrid.commands.report.content import Figure, Note, Table
from sglang_hybrid.commands.report.context import Context
from sglang_hybrid.commands.report.experiments.base import (
    Experiment,
    Result,
    Shown,
    change_of,
    cited,
    needs_policy,
    percent,
    refused_notes,
    settings_lines,
    shown,
)  # fmt: skip
from sglang_hybrid.commands.report.paper_numbers import (
    HC_CENTROIDS,
    HC_CENTROIDS_SOURCE,
    HC_FULL,
    HC_GROUPS,
    HC_GROUPS_SOURCE,
)  # fmt: skip


class HcCodebook(Experiment):
    name = "hc-codebook"
    title = "Centroids and groups"
    paper = "HCAttention"
    question = "How fine must keys be quantised?"
    numbers: ClassVar = ("windows", "prompt_tokens", "decode_tokens")
    uses = "codes"

    def missing(self, context: Context) -> str | None:
        if absent := needs_policy(context, "hcattention"):
            return absent
        if not context.codebooks:
            return (
                "it needs codebooks of this model: make some with sglang-hybrid profile --codebook, "
                "one for each number of "
                "groups and centroids, and name them with --codebook FILE"
            )
        return None

    def run(self, context: Context) -> Result:
        size, baseline = context.size, None
        runs: list[dict[str, Any]] = []
        refused: dict[str, str] = {}
        asked = {"windows": size.windows, "prompt_tokens": size.prompt_tokens, "decode_tokens": size.decode_tokens}
        for name, path in context.codebooks.items():
            # tau 1 isolates the cost of quantisation, as in the paper
            settings = ["policy=hcattention", f"hcattention.codebook={path}", "hcattention.tau=1"]
            session = context.session(settings[:2], variants=["hcattention"])
            found: dict[str, Any] = context.ask(session, "evaluate", variants=[(name, settings)], **asked)
            baseline = baseline or found["runs"][0]
            runs += found["runs"][1:]
            refused |= found["refused"]
        return {**asked, "runs": [baseline, *runs], "refused": refused}

    def draw(self, result: Result) -> Shown:
        runs = result["runs"][1:]
        drawn, (left, right) = figures.figure(9.6, 3.3, 2)
        names = [run["name"] for run in runs]
        left.bar(range(len(runs)), [run["kl_mean"] or 0.0 for run in runs], 0.6, color=figures.colour_of("hcattention"))
        left.set_xticks(range(len(names)), names, fontsize=8)
        left.set_xlabel("groups x centroids (ours)")
        left.set_ylabel("KL to full attention (nats per token)")
        paper = {f"c={count}": score for count, score in HC_CENTROIDS.items()} | {
            f"g={count}": score for count, score in HC_GROUPS.items()
        }
        right.bar(range(len(paper)), [score / HC_FULL for score in paper.values()], 0.6, **figures.PAPER)
        right.set_xticks(range(len(paper)), list(paper), fontsize=8, rotation=35)
        right.set_ylabel("LongBench over full attention's (paper)")
        figures.percent(right)
        rows = tuple(
            (
                run["name"],
                shown(run["perplexity"]),
                change_of(run),
                shown(run["kl_mean"], "{:.4f}"),
                percent(run["top1_agreement"]),
            )
            for run in result["runs"]
        )
        of_paper = (
            *((f"{count} centroids, 32 groups", f"{score:g}") for count, score in HC_CENTROIDS.items()),
            *((f"8192 centroids, {count} groups", f"{score:g}") for count, score in HC_GROUPS.items()),
            ("full attention", f"{HC_FULL:g}"),
        )
        return Shown(
            (
                Figure("hc-codebook", "Left: this model, tau 1. Right, hatched: the paper, Llama-2-7B-32K.", drawn),
                Table(
                    "This model",
                    ("groups x centroids", "perplexity", "change [95 %]", "KL, nats", "same first choice"),
                    rows,
                ),
                Table("The paper: mean of LongBench", ("codebook", "score"), of_paper),
                *refused_notes(result),
                Note(
                    "The paper's keys have 128 channels, so that 32 groups have four channels each. "
                    + cited([HC_CENTROIDS_SOURCE, HC_GROUPS_SOURCE])
                ),
            ),
            settings_lines(result["runs"]),
        )
