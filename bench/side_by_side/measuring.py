"""Measures points of a running server. A point is one input length with one batch size."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.serving.watching import held
from bench.side_by_side import metrics
from bench.side_by_side.load import send_together
from bench.side_by_side.metrics_course import Metrics, MetricsCourse
from bench.side_by_side.prompts import Prompts
from bench.side_by_side.server import Server
from bench.side_by_side.statistics import Slice, course, steady_slices, steady_time, summary
from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.commands.report.session.gpu_trace import EmptyTrace, breakdown, idle_without_profiler, read_trace

Point = dict[str, Any]
LEAST_WINDOW_SECONDS = 2.0  # least time of a repeat in which all rows decode: shorter windows vary
_LONGER = 1.2  # times a window that would be just long enough: steps differ
_SPARE_TOKENS = 4 * BLOCK_TOKENS  # per row: SGLang rounds up, and keeps some pages free
_TRACE_SECONDS = 60


@dataclass(frozen=True)
class MeasurementPlan:
    """How each point is measured."""

    new_tokens: int
    warm_tokens: int
    repeats: int
    slices: int
    different: int | None  # prompts that have nothing in common; None: all
    device: str
    least_window: float = 0.0  # seconds in which all rows decode: answers are made longer for it
    profile_steps: int = 10

    def different_of(self, rows: int) -> int:
        return rows if self.different is None else min(self.different, rows)


def measure(server: Server, prompts: Prompts, plan: MeasurementPlan, length: int, rows: int) -> Point:
    """Measure one point: send all rows together, ``repeats`` times, once their prompts are cached.

    SGLang makes the last row wait until an answer ends if the prompt of the row before it came in chunks.
    """
    different = plan.different_of(rows)
    ids = prompts.rows(length, rows, different)
    begin = time.monotonic()
    if different < rows:
        # caches what rows share: if rows were sent together now, each would compute the shared tokens itself
        send_together(server.url, prompts.beginnings(length, different), 1)
    send_together(server.url, ids, 1)
    prefill_seconds = time.monotonic() - begin
    before = server.metrics()
    seen: list[Metrics] = []  # metrics of the last repeat, by part of the answers
    slices: list[Slice] = []
    first_tokens: list[float] = []
    expected: list[float] = []
    new_tokens, most = plan.new_tokens, most_new_tokens(held(server.url), length, rows, different)
    while len(first_tokens) < plan.repeats:
        with MetricsCourse(server.metrics) as watched:
            arrivals = send_together(server.url, ids, new_tokens)
        steady = steady_time(arrivals, plan.warm_tokens)
        longer = long_enough(new_tokens, steady[1] - steady[0], plan, most)
        if longer > new_tokens and not first_tokens:
            new_tokens = longer
            continue
        first_tokens.append(max(row.times[0] - row.sent for row in arrivals))
        shares = [prompts.expected_share(asked, row.ids) for asked, row in zip(ids, arrivals, strict=True)]
        expected += [share for share in shares if share is not None]
        slices += steady_slices(arrivals, plan.warm_tokens, plan.slices)
        seen = watched.parts(*steady, plan.slices)
    return {
        "length": length,
        "rows": rows,
        "different_prompts": different,
        "new_tokens": new_tokens,
        "text": prompts.kind,
        **summary(slices, rows),
        "course": course(slices, plan.slices),
        "metrics_course": seen,
        "expected_tokens_share": round(sum(expected) / len(expected), 4) if expected else None,
        "prefill_seconds": round(prefill_seconds, 1),
        "seconds_to_all_first_tokens": [round(seconds, 2) for seconds in first_tokens],
        "seconds": round(time.monotonic() - begin, 1),
        "metrics": metrics.during(before, server.metrics()),
    }


def most_new_tokens(held: dict[str, int], length: int, rows: int, different: int) -> int:
    """Return the longest answer with which all rows and ``different`` prompts fit in the server's pool at once."""
    return (held.get("pool_tokens", 0) - different * length) // rows - _SPARE_TOKENS


def long_enough(new_tokens: int, window: float, plan: MeasurementPlan, most: int) -> int:
    """Return answer tokens for a window of ``plan.least_window`` seconds, if ``new_tokens`` tokens gave ``window``.

    The result is at most ``most``, but at least ``new_tokens``.
    """
    if window >= plan.least_window:
        return new_tokens
    measured = new_tokens - plan.warm_tokens
    wanted = plan.warm_tokens + math.ceil(measured * _LONGER * plan.least_window / window)
    return max(new_tokens, min(wanted, most))


def profile(
    server: Server, prompts: Prompts, plan: MeasurementPlan, length: int, rows: int, step_ms: float
) -> dict[str, Any]:
    """Trace a few steps of the same batch and return where the time of a step goes, or ``error``.

    ``step_ms``: length of a step without a profiler. A profiler makes the gaps between kernels longer.
    """

    async def start(session: aiohttp.ClientSession) -> None:
        body = {
            "output_dir": str(server.trace_directory),
            "num_steps": plan.profile_steps,
            "activities": ["CPU" if plan.device == "cpu" else "GPU"],
            "with_stack": False,
            "record_shapes": False,
        }
        async with session.post(f"{server.url}/start_profile", json=body) as reply:
            reply.raise_for_status()

    server.trace_directory.mkdir(parents=True, exist_ok=True)
    seen = set(_traces(server.trace_directory))
    ids = prompts.rows(length, rows, plan.different_of(rows))
    # after the first steps of every row, which read more than later ones
    send_together(server.url, ids, plan.new_tokens, beside=start, beside_after=plan.warm_tokens)
    deadline = time.monotonic() + _TRACE_SECONDS
    while not (new := set(_traces(server.trace_directory)) - seen):
        server.check()
        if time.monotonic() > deadline:
            return {"error": f"no trace after {_TRACE_SECONDS} s"}
        time.sleep(0.5)  # no event to wait for: another program writes
    trace = max(new)
    _wait_until_written(trace, deadline)
    try:
        found = breakdown(read_trace(trace), plan.profile_steps)
        return {"trace": trace.name, **found, "without_profiler": idle_without_profiler(found, step_ms)}
    except (EmptyTrace, ValueError, EOFError) as error:
        return {"error": f"{trace.name}: {error}"}


def _traces(directory: Path) -> list[Path]:
    return [*directory.rglob("*.trace.json.gz"), *directory.rglob("*.trace.json")]


def _wait_until_written(path: Path, deadline: float) -> None:
    size = -1
    while size != (size := path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(1.0)  # another program writes
