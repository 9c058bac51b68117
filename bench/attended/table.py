"""Means over prompts: KL to full attention, prompts with another token, and blocks read, by length and variant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_hybrid.policies.scout.tuning import FIRST_STEPS

# The first token after the prompt is not a decode step's: step 1 predicts the answer's second token.
SPANS = {"1-4": slice(0, 4), f"5-{FIRST_STEPS}": slice(4, FIRST_STEPS), "later": slice(FIRST_STEPS, None)}


def by_length(prompts: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return length -> variant -> means over the steps of all prompts of that length; None where there are no steps.

    ``prompts``: as ``__main__.measure`` returns them.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for length in sorted({prompt["length"] for prompt in prompts}):
        decoded = [prompt for prompt in prompts if prompt["length"] == length and prompt["variants"]]
        names = decoded[0]["variants"] if decoded else {}
        found[str(length)] = {name: _means(decoded, name) for name in names}
    return found


def _means(prompts: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    every = slice(0, FIRST_STEPS)
    tasks = sorted({prompt["task"] for prompt in prompts})
    changes = [prompt["variants"][name]["first_change"] for prompt in prompts]
    return {
        "kl": {span: _mean(prompts, name, "kl", steps) for span, steps in SPANS.items()},
        "late": {span: _mean(prompts, name, "late", steps) for span, steps in SPANS.items()},
        "prompts": len(prompts),
        "prompts_changed_in_first_steps": sum(change is not None and change < FIRST_STEPS for change in changes),
        "kl_of_first_steps_by_task": {
            task: _mean([prompt for prompt in prompts if prompt["task"] == task], name, "kl", every) for task in tasks
        },
    }


def _mean(prompts: Sequence[dict[str, Any]], name: str, key: str, steps: slice) -> float | None:
    values = [value for prompt in prompts for value in prompt["variants"][name][key][steps]]
    return round(sum(values) / len(values), 6) if values else None


def show(prompts: Sequence[dict[str, Any]]) -> str:
    """Return the means as a table for the terminal."""
    spans = "".join(f"{span:>9}" for span in SPANS)
    lines = []
    for length, variants in by_length(prompts).items():
        lines.append(f"{length:18}KL{spans[2:]}  blocks late{spans}  prompts with another token in first steps")
        for name, means in variants.items():
            kl, late = ("".join(_cell(value, digits) for value in means[key].values()) for key, digits in _DIGITS)
            changed = f"{means['prompts_changed_in_first_steps']} of {means['prompts']}"
            lines.append(f"{name:18}{kl}{'':13}{late}  {changed}")
    return "\n".join(lines)


_DIGITS = (("kl", 5), ("late", 2))


def _cell(value: float | None, digits: int) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>9}"
