"""Figures of a decode instance, computed from the times at which tokens arrived."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.serving.killing import decode_rate, longest_pause
from bench.side_by_side.statistics import Arrivals, quantile


def batch_figures(rows: Sequence[Arrivals]) -> dict[str, Any]:
    """Return waits, rates and the longest pause of requests that were sent at the same moment."""
    waited = sorted(row.times[0] - row.sent for row in rows)
    return {
        "rows": len(rows),
        "first_token_s": {
            "least": round(waited[0], 3), "median": round(statistics.median(waited), 3), "most": round(waited[-1], 3),
        },
        "admitted_per_s": admitted_per_s(rows),
        "tokens_per_s": decode_rate(rows),  # None: the first answer was over before the last one began
        "step_ms": _step_ms(rows),
        "longest_pause_s": longest_pause(rows),
    }  # fmt: skip


def admitted_per_s(rows: Sequence[Arrivals]) -> float | None:
    """Return first tokens per second, from the first request's to the last's. None for a single request."""
    first = [row.times[0] for row in rows]
    spent = max(first) - min(first)
    return round((len(rows) - 1) / spent, 3) if spent > 0 else None


def pause_figures(running: Sequence[Arrivals], arriving: Sequence[Arrivals]) -> dict[str, Any]:
    """Return pauses of ``running`` requests from when ``arriving`` ones were sent until these all had first tokens."""
    begin, end = min(row.sent for row in arriving), max(row.times[0] for row in arriving)
    gaps = sorted(
        b - a for row in running for a, b in zip(row.times, row.times[1:], strict=False) if b >= begin and a <= end
    )
    waited = sorted(row.times[0] - row.sent for row in arriving)
    return {
        "running": len(running),
        "arriving": len(arriving),
        "seconds_until_all_began": round(end - begin, 3),
        "admitted_per_s": admitted_per_s(arriving),
        "first_token_s": {"median": round(statistics.median(waited), 3), "most": round(waited[-1], 3)},
        "longest_pause_s": longest_pause(running, begin, end),
        "p99_pause_s": round(quantile(gaps, 0.99), 4) if gaps else None,
        "longest_pause_before_s": longest_pause(running, until=begin),
        # a running answer that ended before the last request began says nothing about the end of that time
        "running_to_the_end": sum(row.times[-1] >= end for row in running),
    }


def _step_ms(rows: Sequence[Arrivals]) -> float | None:
    rate = decode_rate(rows)
    return round(1e3 * len(rows) / rate, 3) if rate else None
