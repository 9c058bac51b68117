"""HCAttention, table 1a and section 4.2: GPU memory by context, up to millions of tokens, by arithmetic alone."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang_hybrid.commands.report import figures
from sglang_hybrid.commands.report.content import Figure, Note, Table
from sglang_hybrid.commands.report.context import Context
from sglang_hybrid.commands.report.experiments.base import Experiment, Result, Shown, cited
from sglang_hybrid.commands.report.paper_numbers import (
    HC_LONGEST_GB,
    HC_LONGEST_SOURCE,
    HC_LONGEST_TOKENS,
    HC_MEMORY,
    HC_MEMORY_SOURCE,
)  # fmt: skip
from sglang_hybrid.config import load_config
from sglang_hybrid.memory.capacity import KVShape
from sglang_hybrid.memory.device_capacity import page_bytes, scout_row_bytes

_CONTEXTS = (32_768, 131_072, 524_288, 1_048_576, 2_097_152, 4_194_304)
_GB = 1e9
LLAMA = KVShape(layers=32, kv_heads=8, key_dim=128, value_dim=128, itemsize=2)


class HcMemory(Experiment):
    name = "hc-memory"
    title = "GPU memory by context"
    paper = "HCAttention"
    question = "How much GPU memory does one request of millions of tokens take?"
    uses = "nothing"
    by_arithmetic = True
    numbers: ClassVar = ()

    def run(self, context: Context) -> Result:
        model = context.model
        own = KVShape(model.layers, model.kv_heads, model.head_dim, model.head_dim, 2)
        shapes = {"Llama-3-8B": LLAMA, model.name: own}
        return {"contexts": _CONTEXTS, "models": {name: _memory(shape) for name, shape in shapes.items()}}

    def draw(self, result: Result) -> Shown:
        contexts = result["contexts"]
        drawn, (axes,) = figures.figure(7.6, 4.0)
        looks = {"full": ("full", "-"), "scout": ("scout", "-")}
        for number, (name, values) in enumerate(result["models"]["Llama-3-8B"].items()):
            colour, line = looks.get(name.partition(",")[0], ("hcattention", ("-", "--", ":", "-.")[number % 4]))
            axes.plot(contexts, values, line, color=figures.colour_of(colour), label=name, linewidth=1.6)
        axes.plot(
            HC_LONGEST_TOKENS, HC_LONGEST_GB, "D", markerfacecolor="none", markeredgecolor=figures.INK, markersize=8,
            label=f"paper: 4 million tokens, {HC_LONGEST_GB} GB with weights",
        )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(contexts, [_label(count) for count in contexts])
        axes.set_xlabel("context (tokens)")
        axes.set_ylabel("GPU memory of one request (GB)")
        figures.legend(axes)
        tables = tuple(
            Table(
                f"GB of GPU memory, {name}, 16-bit cache (by arithmetic)", ("", *(_label(count) for count in contexts)),
                tuple((kind, *(f"{value:,.3g}" for value in values)) for kind, values in kinds.items()),
            )
            for name, kinds in result["models"].items()
        )  # fmt: skip
        shares = ", ".join(f"{name} {100 * share:g} %" for name, share in HC_MEMORY.items())
        return Shown(
            (
                Figure("hc-memory", "Llama-3-8B, one request, without weights. By arithmetic, nothing was run.", drawn),
                *tables,
                Note(
                    f"The paper's shares of the KV cache on the GPU: {shares}. An index of a centroid "
                    "counts two bytes. scout "
                    "keeps digests and sketches of all blocks, slots for one budget of 2,048 tokens and scores. "
                    + cited([HC_MEMORY_SOURCE, HC_LONGEST_SOURCE])
                ),
            )
        )


def _memory(shape: KVShape) -> dict[str, list[float]]:
    """Return the GB of GPU memory that each kind of KV cache takes, for each of ``_CONTEXTS``."""
    config = load_config(None, ["policy=scout", "budget_tokens=2048"])
    kinds: dict[str, Any] = {"full attention": lambda tokens: tokens * shape.bytes_per_token}
    kinds |= {
        f"hcattention, {name}": lambda tokens, share=share: tokens * shape.bytes_per_token * share
        for name, share in HC_MEMORY.items()
    }

    def scout(tokens: int) -> int:
        blocks = -(-tokens // 32)
        row = scout_row_bytes(config, shape, blocks)
        return blocks * page_bytes(config, shape, "cuda").total + row.slots + row.scores

    kinds["scout, budget 2048"] = scout
    return {name: [round(of(tokens) / _GB, 4) for tokens in _CONTEXTS] for name, of in kinds.items()}


def _label(tokens: int) -> str:
    return f"{tokens // 1_048_576}M" if tokens >= 1_048_576 else f"{tokens // 1024}k"
