"""Shared parts of the experiments about speed: policies, measurements, and notes on policies that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_hybrid.commands.report.content import Note
from sglang_hybrid.commands.report.context import STOCK, Context
from sglang_hybrid.commands.report.session.client import MeasurementError

PAPERS = (STOCK, "scout", "scoutattention", "hgca", "infinigen")


def speeds_of(context: Context, policies: Sequence[str]) -> dict[str, Any]:
    """Measure each policy's speed; policies that fail are listed under ``failed`` with the reason.

    Raise MeasurementError only if all policies fail.
    """
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
    """Return the tokens per second of one point in ``speed``, or None if the point was not measured."""
    for point in speed["points"]:
        if (point["length"], point["rows"]) == (length, rows):
            rate: float | None = point.get("tokens_per_s")
            return rate
    return None


def speed_settings_lines(result: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{one['policy']}: {' '.join(one['settings']) or 'SGLang as it is'}" for one in result["speeds"])
