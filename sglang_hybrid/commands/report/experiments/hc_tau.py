"""HCAttention, table 3: the threshold tau of attention mass."""

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
    change_of,
    cited,
    needs_policy,
    percent,
    refused_notes,
    settings_lines,
    shown,
)  # fmt: skip
from sglang_hybrid.commands.report.paper_numbers import HC_FULL, HC_TAU, HC_TAU_SOURCE

SETTINGS = ["policy=hcattention", "hcattention.codebook=none"]  # keys are not quantised: only tau has an effect


class HcTau(Experiment):
    name = "hc-tau"
    title = "Tokens attended by tau"
    paper = "HCAttention"
    question = "How many tokens reach a share tau of the attention, and what do the others matter?"
    numbers: ClassVar = ("windows", "prompt_tokens", "decode_tokens", "taus")
    uses = "codes"

    def missing(self, context: Context) -> str | None:
        return needs_policy(context, "hcattention")

    def run(self, context: Context) -> Result:
        size = context.size
        variants: Variants = [(f"tau {tau:g}", [*SETTINGS, f"hcattention.tau={tau}"]) for tau in size.taus]
        session = context.session(SETTINGS, variants=["hcattention"])
        asked = {"windows": size.windows, "prompt_tokens": size.prompt_tokens, "decode_tokens": size.decode_tokens}
        return {"taus": size.taus, **asked, **context.ask(session, "evaluate", variants=variants, **asked)}

    def draw(self, result: Result) -> Shown:
        runs, taus = by_name(result["runs"]), result["taus"]
        own = [runs.get(f"tau {tau:g}", {}) for tau in taus]
        drawn, (left, right) = figures.figure(9.6, 3.3, 2)
        colour = figures.colour_of("hcattention")
        same = [run.get("top1_agreement") for run in own]
        known = [float("nan") if one is None else one for one in same]
        left.plot(taus, known, "o-", color=colour, label="ours: same first choice")
        left.plot(
            list(HC_TAU), [score / HC_FULL for _, score in HC_TAU.values()], "D", label="paper: LongBench over full's",
            markerfacecolor="none", **figures.PAPER_LINE,
        )  # fmt: skip
        left.axhline(1, color=figures.colour_of("full"), linewidth=1)
        left.set_ylim(0, 1.1)
        left.set_ylabel("share of full attention's")
        figures.percent(left)
        shares = [run.get("cpu_ratio") for run in own]
        if any(share is not None for share in shares):
            right.plot(taus, [float("nan") if one is None else one for one in shares], "o-", color=colour, label="ours")
        right.plot(
            list(HC_TAU), [share for share, _ in HC_TAU.values()], "D", label="paper, Llama-2-7B-32K",
            markerfacecolor="none", **figures.PAPER_LINE,
        )  # fmt: skip
        right.set_yscale("log")
        right.set_ylabel("tokens attended")
        figures.percent(right)
        for axes in (left, right):
            axes.set_xlabel("tau")
            figures.legend(axes)
        rows = tuple(
            (
                f"{tau:g}", shown(run.get("perplexity")), change_of(run), shown(run.get("kl_mean"), "{:.4f}"),
                percent(run.get("cpu_ratio")), percent(HC_TAU[tau][0]) if tau in HC_TAU else "",
                f"{HC_TAU[tau][1]:g}" if tau in HC_TAU else "",
            )
            for tau, run in zip(taus, own, strict=True)
        )  # fmt: skip
        head = (
            "tau",
            "perplexity",
            "change [95 %]",
            "KL, nats",
            "tokens attended",
            "paper: attended",
            "paper: LongBench",
        )
        return Shown(
            (
                Figure("hc-tau", f"Behind {result['prompt_tokens']} tokens. Dashed: the paper.", drawn),
                Table(f"By tau; full attention: perplexity {shown(result['runs'][0]['perplexity'])}", head, rows),
                *refused_notes(result),
                Note("Keys are not quantised here, as in the paper's table. " + cited([HC_TAU_SOURCE])),
            ),
            settings_lines(result["runs"]),
        )
