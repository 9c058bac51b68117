"""ScoutAttention, table 1: cosines between predicted and real queries."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang_hybrid.commands.report import figures
from sglang_hybrid.commands.report.content import Figure, Note, Table
from sglang_hybrid.commands.report.context import Context
from sglang_hybrid.commands.report.experiments.base import Experiment, Result, Shown, cited
from sglang_hybrid.commands.report.experiments.scout_ratio import SCOUTS, text_settings
from sglang_hybrid.commands.report.paper_numbers import SCOUT_COSINES


class ScoutCosines(Experiment):
    name = "scout-cosines"
    title = "Predicted and real queries"
    paper = "ScoutAttention"
    question = "How near is the predicted query of each layer to the real one?"
    numbers: ClassVar = ("fit_windows", "fit_tokens")

    def run(self, context: Context) -> Result:
        session = context.session(text_settings(context), variants=SCOUTS)
        found = context.ask(session, "cosines", windows=context.size.fit_windows, window_tokens=context.size.fit_tokens)
        return {"model": context.model.name, **found}

    def draw(self, result: Result) -> Shown:
        layers = result["layers"]
        means = {kind: sum(layer[kind] for layer in layers) / len(layers) for kind in ("raw", "calibrated")}
        drawn, (left, right) = figures.figure(9.6, 3.4, 2)
        for kind, own in (("raw", "scoutattention"), ("calibrated", "scout")):
            places = [layer["layer"] for layer in layers]
            left.plot(
                places,
                [layer[kind] for layer in layers],
                "o-",
                markersize=3.5,
                color=figures.colour_of(own),
                label=kind,
            )
        left.set_xlabel("layer")
        figures.whole_numbers(left)
        left.set_ylabel("cosine of predicted and real query")
        left.set_ylim(top=1.005)
        figures.legend(left, loc="lower right")
        names = [*SCOUT_COSINES, f"{result['model']}, raw", "calibrated"]
        values = [*(number.value for number in SCOUT_COSINES.values()), means["raw"], means["calibrated"]]
        for place, (name, value) in enumerate(zip(names, values, strict=True)):
            ours = {len(names) - 2: "scoutattention", len(names) - 1: "scout"}.get(place)
            look: dict[str, Any] = figures.PAPER if name in SCOUT_COSINES else {"color": figures.colour_of(ours or "")}
            right.barh(place, value, 0.62, **look)
            right.annotate(
                f"{value:.3g}",
                (value, place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=figures.INK,
            )
        right.set_yticks(range(len(names)), names, fontsize=8)
        right.invert_yaxis()
        right.set_xlim(min(0.8, min(values) - 0.05), 1.02)
        right.set_xlabel("mean cosine")
        right.grid(visible=False)
        rows = tuple(
            (str(one["layer"]), f"{one['raw']:.3f}", f"{one['calibrated']:.3f}", str(one["rank"])) for one in layers
        )
        rows += (("mean", f"{means['raw']:.3f}", f"{means['calibrated']:.3f}", ""),)
        return Shown(
            (
                Figure("scout-cosines", "Hatched: the paper's models, predicted raw.", drawn),
                Table("Cosine by layer", ("layer", "raw", "calibrated", "rank of the correction"), rows),
                Note(
                    f"Fitted on {result['fitted_tokens']} tokens, measured on "
                    f"{result['unseen_tokens']} others; a server fits "
                    "on several times as many. Raw is the paper's prediction: the next layer's own "
                    "projection of this layer's "
                    "input. The first layer is left out, nothing predicts it. " + cited(SCOUT_COSINES.values())
                ),
            ),
            ("a server fits the same predictor with --hybrid profile=auto",),
        )
