"""ScoutAttention, figure 10: block sizes. The host pool supports one size, so the sweep is by arithmetic."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.commands.report import figures
from sglang_hybrid.commands.report.content import Figure, Note, Table
from sglang_hybrid.commands.report.context import Context
from sglang_hybrid.commands.report.experiments.base import Experiment, Result, Shown, cited, percent
from sglang_hybrid.commands.report.paper_numbers import SCOUT_BLOCK_TOKENS

_SIZES = (16, 32, 64, 128)


class ScoutBlockSize(Experiment):
    name = "scout-block-size"
    title = "Block size"
    paper = "ScoutAttention"
    question = "What do larger blocks save?"
    numbers: ClassVar = ()
    uses = "nothing"
    by_arithmetic = True

    def run(self, context: Context) -> Result:
        # a digest is the minimum and the maximum of a block's keys: two keys, beside 2 x block keys and values
        return {"sizes": _SIZES, "digest_share": [1 / size for size in _SIZES], "ours": BLOCK_TOKENS}

    def draw(self, result: Result) -> Shown:
        drawn, (axes,) = figures.figure(7.2, 3.0)
        names = [str(size) for size in result["sizes"]]
        for place, (size, share) in enumerate(zip(result["sizes"], result["digest_share"], strict=True)):
            ours = size == result["ours"]
            look: dict[str, Any] = {"color": figures.colour_of("scout")} if ours else figures.PAPER
            axes.bar(place, share, 0.6, **look)
            axes.annotate(
                percent(share) + (" (ours)" if ours else ""), (place, share), xytext=(0, 3), textcoords="offset points",
                ha="center", fontsize=9, color=figures.INK,
            )  # fmt: skip
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel("tokens of a block")
        axes.set_ylabel("digests / KV cache")
        figures.percent(axes)
        axes.margins(y=0.15)
        rows = tuple(
            (str(size), percent(share)) for size, share in zip(result["sizes"], result["digest_share"], strict=True)
        )
        return Shown(
            (
                Figure(
                    "scout-block-size",
                    "Memory of min/max digests on the GPU, by arithmetic. Hatched: not possible here.",
                    drawn,
                ),
                Table("Digests of 16-bit keys", ("tokens of a block", "share of the KV cache"), rows),
                Note(
                    "Ours has one point: pages of the host pool, digests, the mailbox and all "
                    "kernels are built for blocks of "
                    f"{BLOCK_TOKENS} tokens, the paper's own default. The paper's figure 10 compares "
                    "three sizes and finds "
                    "that larger blocks leave memory for larger batches, because digests shrink; its text names no "
                    "throughput, so only the memory is shown. Our int8 digests and 4-bit sketches are not counted. "
                    + cited([SCOUT_BLOCK_TOKENS])
                ),
            )
        )
