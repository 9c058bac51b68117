"""HGCA, figure 15: token rate over one long answer."""

from __future__ import annotations

from typing import ClassVar

from sglang_hybrid.commands.report import figures
from sglang_hybrid.commands.report.content import Figure, Note, Table
from sglang_hybrid.commands.report.context import RATE_POLICIES, Context
from sglang_hybrid.commands.report.experiments.base import Experiment, Result, Shown, cited, shown
from sglang_hybrid.commands.report.experiments.speeds import speed_notes, speed_settings_lines, speeds_of
from sglang_hybrid.commands.report.paper_numbers import (
    HGCA_RATE_END,
    HGCA_RATE_SOURCE,
    HGCA_RATE_TOKENS,
    HGCA_RATE_WINDOW,
)  # fmt: skip


class HgcaRate(Experiment):
    name = "hgca-rate"
    title = "Token rate over a long answer"
    paper = "HGCA"
    question = "Does the token rate fall as the KV cache of one answer grows?"
    numbers: ClassVar = ("rate_prompt", "rate_steps", "rate_window", "speed_budget")
    uses = "speed"

    def run(self, context: Context) -> Result:
        return {"window": context.size.rate_window, **speeds_of(context, RATE_POLICIES)}

    def draw(self, result: Result) -> Shown:
        drawn, (axes,) = figures.figure(7.6, 3.6)
        for number, one in enumerate(result["speeds"]):
            bins = one["rate"]["bins"]
            axes.plot(
                [part["until"] for part in bins], [part["tokens_per_s"] for part in bins], "-",
                color=figures.colour_of(one["policy"], number), label=one["policy"], linewidth=1.5,
            )  # fmt: skip
        low, high = HGCA_RATE_END
        axes.axhspan(low, high, facecolor="none", edgecolor=figures.INK, hatch="////", linewidth=0, alpha=0.5,
                     label=f"paper: {low:g} to {high:g} tokens/s at the end of 16k")  # fmt: skip
        axes.axvline(result["window"], label=f"window of hgca, {result['window']} tokens", **figures.PAPER_LINE)
        axes.set_xlabel("tokens of prompt and answer")
        axes.set_ylabel("tokens per second, one row")
        axes.set_ylim(bottom=0)
        figures.legend(axes)
        rows = tuple(
            (
                one["policy"], one["engine"], str(one["rate"]["steps"]),
                *(shown(one["rate"]["bins"][place]["tokens_per_s"], "{:.1f}") for place in (0, -1)),
                *(shown(one["rate"]["ms_between_tokens"][key], "{:.0f}") for key in ("median", "p95", "longest")),
            )
            for one in result["speeds"]
        )  # fmt: skip
        head = ("", "engine", "tokens", "first tokens/s", "last tokens/s", "ms between tokens", "p95", "longest")
        return Shown(
            (
                Figure(
                    "hgca-rate", "One row that decodes a text token by token. Hatched: the paper, GPT-NeoX-12B.", drawn
                ),
                Table("Rates", head, rows),
                *speed_notes(result),
                Note(
                    f"The paper decodes {HGCA_RATE_TOKENS:,} tokens with {HGCA_RATE_WINDOW:,} of them "
                    "on the GPU and beta 1. " + cited([HGCA_RATE_SOURCE])
                ),
            ),
            speed_settings_lines(result),
        )
