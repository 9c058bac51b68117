"""Accuracy and speed of all registered policies, side by side."""

from __future__ import annotations

from collections.abc import Sequence
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
    percent,
    refused_notes,
    score_of,
    settings_lines,
    shown,
)  # fmt: skip
from sglang_hybrid.commands.report.experiments.scout_ratio import text_settings
from sglang_hybrid.commands.report.experiments.speeds import rate_at
from sglang_hybrid.commands.report.session.client import MeasurementError
from sglang_hybrid.policies.registry import policy_named

KNOWN = ("full", "scout", "scoutattention", "hgca", "hcattention", "infinigen")


class Policies(Experiment):
    name = "policies"
    title = "All policies side by side"
    paper = "all"
    question = "What does each policy cost in accuracy and in speed, on the same prompts?"
    numbers: ClassVar = (
        "windows", "prompt_tokens", "decode_tokens", "budget", "lengths", "depths", "repeats", "batches",
        "batch_length", "speed_lengths", "speed_rows", "speed_budget", "speed_steps", "warm_steps", "rate_window",
    )  # fmt: skip
    uses = "speed"

    def run(self, context: Context) -> Result:
        size = context.size
        named = [name for name in dict.fromkeys((*KNOWN, *context.policies)) if name in context.policies]
        failed = {name: "the policy is not registered in this installation" for name in KNOWN if name not in named}
        runs: dict[str, dict[str, Any]] = {}
        refused: dict[str, str] = {}
        for group in _groups(named):
            try:
                found = self._evaluate(context, group)
            except MeasurementError as error:
                failed |= {name: str(error) for name in group}
                continue
            runs |= {run["name"]: run for run in found["runs"] if run["name"] not in runs}
            refused |= found["refused"]
        speeds = {}
        for policy in named:
            try:
                speeds[policy] = context.speed_of(policy)
            except MeasurementError as error:
                failed[policy] = f"speed: {error}"
        rates = {
            policy: {
                "tokens_per_s": rate_at(speed, max(size.speed_lengths), size.speed_rows), "engine": speed["engine"],
                "batch": rate_at(speed, size.batch_length, max(size.batches)),
            }
            for policy, speed in speeds.items()
        }  # fmt: skip
        if not runs and not rates:
            raise MeasurementError("; ".join(f"{policy}: {why}" for policy, why in failed.items()))
        numbers = {
            "length": max(size.speed_lengths),
            "rows": size.speed_rows,
            "batch": max(size.batches),
            "batch_length": size.batch_length,
        }
        asked = {"prompt_tokens": size.prompt_tokens, "needle_length": size.lengths[-1], "budget": size.budget}
        return {**numbers, **asked, "runs": list(runs.values()), "rates": rates, "refused": refused, "failed": failed}

    def _evaluate(self, context: Context, group: Sequence[str]) -> dict[str, Any]:
        size = context.size
        variants: Variants = [(name, policy_settings(context, name)) for name in group if name != "full"]
        coded = [name for name in group if policy_named(name).code_bytes is not None]
        settings = policy_settings(context, coded[0])[:-1] if coded else text_settings(context)
        session = context.session(settings, variants=group)
        found: dict[str, Any] = context.ask(
            session, "evaluate", variants=variants, windows=size.windows, prompt_tokens=size.prompt_tokens,
            decode_tokens=size.decode_tokens, lengths=size.lengths[-1:], depths=size.depths, repeats=size.repeats,
        )  # fmt: skip
        return found

    def draw(self, result: Result) -> Shown:
        runs = {run["name"]: run for run in result["runs"]}
        names = list(dict.fromkeys([*(name for name in runs if name != "full attention"), *result["rates"]]))
        drawn, panels = figures.figure(10.4, 3.2, 3)
        columns: list[tuple[str, list[float | None], str]] = [
            ("KL to full attention (nats)", [(runs.get(name) or {}).get("kl_mean") for name in names], "{:.4f}"),
            ("needles found (%)", [_needle(runs, name) for name in names], "{:.0f}"),
            (
                f"tokens/s, {result['rows']} x {result['length']} tokens",
                [(result["rates"].get(name) or {}).get("tokens_per_s") for name in names], "{:.1f}",
            ),
        ]  # fmt: skip
        for axes, (text, values, form) in zip(panels, columns, strict=True):
            for place, (name, value) in enumerate(zip(names, values, strict=True)):
                if value is not None:
                    axes.barh(place, value, 0.62, color=figures.colour_of(name, place))
                    axes.annotate(
                        form.format(value),
                        (value, place),
                        xytext=(3, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=8,
                        color=figures.INK,
                    )
            axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names))
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_xlabel(text)
            axes.margins(x=0.22)
            axes.grid(visible=False)
        order = ["full attention", *(name for name in names if name != "full")]
        rows = tuple(
            _row(name, runs.get(name), result["rates"].get("full" if name == "full attention" else name) or {})
            for name in order
        )
        head = (
            "policy", "perplexity", "change [95 %]", "KL, nats", "same first choice", "needles", "tokens/s",
            f"tokens/s, {result['batch']} rows", "engine",
        )  # fmt: skip
        elements: list[Element] = [
            Figure(
                "policies",
                f"Budget {result['budget']} tokens where a policy has one. Accuracy behind "
                f"{result['prompt_tokens']} tokens, "
                f"needles in {result['needle_length']} tokens.",
                drawn,
            ),
            Table("On the same prompts", head, rows),
            *(Note(f"{name}: {why}", "warning") for name, why in result["failed"].items()),
            *refused_notes(result),
            Note(
                "Speed is that of the engine which a server with these settings has on this machine. Plain torch is a "
                "reference: its speed says nothing about a policy."
            ),
        ]
        return Shown(tuple(elements), settings_lines(result["runs"]))


def policy_settings(context: Context, name: str) -> list[str]:
    """Return the settings with which a policy is compared: the budget of the size, or the policy's own defaults.

    The last setting does not affect prefill, so callers may drop it to load a model.
    """
    settings = [f"policy={name}"]
    if name == "hgca":
        return [*settings, f"hgca.window_tokens={max(64, context.size.budget // 32 * 32)}"]
    if name == "hcattention":
        codebook = next((str(path) for path in context.codebooks.values()), "none")
        return [*settings, f"hcattention.codebook={codebook}", "hcattention.tau=0.9"]
    return [*settings, f"budget_tokens={context.size.budget}"]


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Group the policies that can decode after one prefill: all without codes of keys, and each other one alone."""
    plain = [name for name in names if policy_named(name).code_bytes is None]
    return [plain, *([name] for name in names if name not in plain)]


def _needle(runs: dict[str, dict[str, Any]], name: str) -> float | None:
    of = runs.get("full attention" if name == "full" else name)
    score = score_of(of, "needle") if of else None
    return None if score is None else 100 * score


def _row(name: str, run: dict[str, Any] | None, rate: dict[str, Any]) -> tuple[str, ...]:
    of = run or {"tasks": {}}
    return (
        name, shown(of.get("perplexity")), change_of(of), shown(of.get("kl_mean"), "{:.4f}"),
        percent(of.get("top1_agreement")), percent(score_of(of, "needle"), "{:.0f} %"),
        shown(rate.get("tokens_per_s"), "{:.1f}"), shown(rate.get("batch"), "{:.1f}"), rate.get("engine", ""),
    )  # fmt: skip
