"""HGCA, table 1: perplexity by the share of the dense window and by beta."""

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
    by_name,
    cited,
    needs_policy,
    refused_notes,
    settings_lines,
    shown,
)  # fmt: skip
from sglang_hybrid.commands.report.experiments.scout_ratio import text_settings
from sglang_hybrid.commands.report.paper_numbers import (
    HGCA_BETAS,
    HGCA_PERPLEXITY,
    HGCA_PERPLEXITY_SOURCE,
    HGCA_RATIOS,
)  # fmt: skip

_DRAWN = ("OPT-6.7B", "LLaMA-2-7B")
_LIMIT = 0.1  # relative change of perplexity at both ends of the colour scale


class HgcaPerplexity(Experiment):
    name = "hgca-perplexity"
    title = "Perplexity by window and beta"
    paper = "HGCA"
    question = "What do a smaller dense window and a stricter choice of older tokens cost?"
    numbers: ClassVar = ("windows", "prompt_tokens", "decode_tokens", "ratios", "betas")

    def missing(self, context: Context) -> str | None:
        return needs_policy(context, "hgca")

    def run(self, context: Context) -> Result:
        size = context.size
        variants: Variants = [
            (
                _name(ratio, beta),
                ["policy=hgca", "hgca.window_tokens=64", f"hgca.window_ratio={ratio}", f"hgca.beta={beta}"],
            )
            for ratio in size.ratios
            for beta in size.betas
        ]
        session = context.session(text_settings(context), variants=["hgca"])
        asked = {"windows": size.windows, "prompt_tokens": size.prompt_tokens, "decode_tokens": size.decode_tokens}
        found = context.ask(session, "evaluate", variants=variants, **asked)
        shape = {"ratios": size.ratios, "betas": size.betas, "model": context.model.name}
        return {**shape, "prompt_tokens": size.prompt_tokens, **found}

    def draw(self, result: Result) -> Shown:
        runs, baseline = by_name(result["runs"]), result["runs"][0]["perplexity"]
        ours = [
            [_change(runs.get(_name(ratio, beta)), baseline) for beta in result["betas"]] for ratio in result["ratios"]
        ]
        drawn, panels = figures.figure(10.4, 2.9, 1 + len(_DRAWN))
        grids = [(f"{result['model']} (ours)", ours, result["ratios"], result["betas"])]
        grids += [(f"{name} (paper)", _paper_changes(name), HGCA_RATIOS, HGCA_BETAS) for name in _DRAWN]
        for axes, (title, grid, ratios, betas) in zip(panels, grids, strict=True):
            rows, columns = [f"{ratio:g}" for ratio in ratios], [f"{beta:g}" for beta in betas]
            percent = [[None if one is None else 100 * one for one in row] for row in grid]
            image = figures.heat_map(
                axes, percent, rows, columns, low=-100 * _LIMIT, high=100 * _LIMIT, form="{:+.1f}", colours="PuOr_r"
            )
            axes.set_title(title, fontsize=9, color=figures.INK)
            axes.set_xlabel("beta")
        panels[0].set_ylabel("share of the window")
        figures.colour_bar(drawn, image, panels, "perplexity against\nfull attention (%)")
        table = tuple(
            (f"{ratio:g}", *(shown((runs.get(_name(ratio, beta)) or {}).get("perplexity")) for beta in result["betas"]))
            for ratio in result["ratios"]
        )
        of_paper = tuple(
            (
                model if number == 0 else "",
                shown(full, "{:g}") if number == 0 else "",
                f"{HGCA_RATIOS[number]:g}",
                *(f"{one:g}" for one in row),
            )
            for model, (full, grid) in HGCA_PERPLEXITY.items()
            for number, row in enumerate(grid)
        )
        betas = tuple(f"beta {beta:g}" for beta in result["betas"])
        return Shown(
            (
                Figure("hgca-perplexity", "Change of perplexity. Colours end at 10 %.", drawn),
                Table(f"{result['model']}: perplexity; full attention {shown(baseline)}", ("window", *betas), table),
                Table(
                    "The paper",
                    ("model", "full attention", "window", *(f"beta {beta:g}" for beta in HGCA_BETAS)),
                    of_paper,
                ),
                *refused_notes(result),
                Note(
                    f"Ours decodes behind {result['prompt_tokens']} prefilled tokens, the paper "
                    "scores whole texts of 2,048 to "
                    "8,192 tokens. " + cited([HGCA_PERPLEXITY_SOURCE])
                ),
            ),
            settings_lines(result["runs"]),
        )


def _name(ratio: float, beta: float) -> str:
    return f"window {ratio:g}, beta {beta:g}"


def _change(run: Result | None, baseline: float | None) -> float | None:
    return run["perplexity"] / baseline - 1 if run and run["perplexity"] and baseline else None


def _paper_changes(model: str) -> list[list[float | None]]:
    full, grid = HGCA_PERPLEXITY[model]
    return [[value / full - 1 for value in row] for row in grid]
