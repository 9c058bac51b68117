"""What experiments about speed share: which policies, and who of them could not be measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_hybrid.commands.report.content import Note
from sglang_hybrid.commands.report.context import STOCK, Context
from sglang_hybrid.commands.report.session.client import MeasurementError

PAPERS = (STOCK, "scout", "scoutattention", "hgca", "infinigen")


def speeds_of(context: Context, policies: Sequence[str]) -> dict[str, Any]:
    """Measurements by policy. One that fails is named and does not take the others along."""
    speeds, failed = [], {}
    for policy in policies:
        if policy != STOCK and policy not in context.policies:
            failed[policy] = "the policy is not registered in this installation"
            continue
        try:
            speeds.append(context.speed_of(policy))
        except MeasurementError as error:
            failed[policy] = str(error)
    if not speeds:
        raise MeasurementError("; ".join(f"{policy}: {why}" for policy, why in failed.items()))
    return {"speeds": speeds, "failed": failed, "has_gpu": context.has_gpu}


def speed_notes(result: dict[str, Any]) -> tuple[Note, ...]:
    notes = [Note(f"{policy} was left out: {why}", "warning") for policy, why in result["failed"].items()]
    if not result["has_gpu"]:
        notes.append(
            Note(
                "There is no GPU here: all of attention runs on the same CPU cores, so these numbers say what a policy "
                "costs on a CPU host, not what GPU and CPU do together. Engines: "
                + ", ".join(f"{one['policy']} by {one['engine']}" for one in result["speeds"])
                + ". Plain torch is a reference implementation, which is slow.",
                "warning",
            )
        )
    return tuple(notes)


def rate_at(speed: dict[str, Any], length: int, rows: int) -> float | None:
    """Tokens per second of a point; None where it was not measured."""
    for point in speed["points"]:
        if (point["length"], point["rows"]) == (length, rows):
            rate: float | None = point.get("tokens_per_s")
            return rate
    return None


def speed_settings_lines(result: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{one['policy']}: {' '.join(one['settings']) or 'SGLang as it is'}" for one in result["speeds"])
