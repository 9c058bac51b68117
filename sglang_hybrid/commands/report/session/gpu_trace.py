"""GPU time of a decode step by category of kernel, from a Chrome trace of torch's profiler.

Kernels of different streams overlap, so each category has two numbers: `busy` is the time in which at least one of its
kernels ran; `alone` is the part of `busy` in which no other category ran, the most that removing the category could
save. The wait for the worker is a kernel too. `idle` is the time in which nothing ran, `waiting` the time in which
nothing ran except waits for the worker and copies over PCIe. Every gap between the first and the last kernel of the
trace is idle time, however long the gap is; `gaps` shows the distribution. A profiler lengthens gaps but hardly
lengthens kernels, so ``idle_without_profiler`` combines the busy time of a trace with the step time of a run without a
profiler.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from pathlib import Path
from typing import Any

# The first matching pattern decides. This package's kernels come first: their names are exact, the others are families.
CATEGORIES: tuple[tuple[str, str], ...] = (
    ("wait", r"wait_for_replies"),
    (
        "scout lane",
        r"score_blocks|shares_of|block_scores|select_blocks|post_layer|shift_lse|predict|unit_rms|finish_queries",
    ),
    ("gather", r"gather_blocks|apply_plan"),
    ("append", r"append_tokens|digest_pages|set_kv|store_cache|store_kv"),
    (
        "attention",
        r"attend_slots|attend_pages|finish_late|merge_sides|flash|BatchDecode|BatchPrefill|paged|MergeState|VariableLength|attention|fmha",
    ),
    ("GEMM", r"gemm|gemv|cutlass|cublas|nvjet|splitKreduce|wgmma"),
    ("copy", r"memcpy|memset"),
)
OTHER, IDLE = "other", "idle"
_WAITING = {"wait", "gather"}  # categories that wait for the CPU worker or for PCIe
# In microseconds. Shorter gaps lie between launches of one step; in longer gaps the host had launched nothing.
_LONG_GAP = 60
_GPU_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in CATEGORIES)

Interval = tuple[float, float]  # microseconds


class EmptyTrace(ValueError):
    """The trace contains no GPU events."""


def category_of(kernel: str) -> str:
    return next((name for name, pattern in _PATTERNS if pattern.search(kernel)), OTHER)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace file, which may be compressed (.gz)."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    loaded = json.loads(data)
    events: list[dict[str, Any]] = loaded["traceEvents"] if isinstance(loaded, dict) else loaded
    return events


def breakdown(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return the milliseconds per step by category, for a trace of ``steps`` steps. Raise EmptyTrace if it is empty."""
    by_category: dict[str, list[Interval]] = {}
    kernels: dict[str, list[float]] = {}
    streams: dict[str, set[Any]] = {}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in _GPU_EVENTS:
            continue
        category, begin = category_of(event["name"]), float(event["ts"])
        by_category.setdefault(category, []).append((begin, begin + float(event["dur"])))
        kernels.setdefault(event["name"], []).append(float(event["dur"]))
        streams.setdefault(category, set()).add(event.get("args", {}).get("stream", event.get("tid")))
    if not by_category:
        raise EmptyTrace("the trace has no GPU events")
    busy = {name: union(intervals) for name, intervals in by_category.items()}
    everything = union([interval for intervals in busy.values() for interval in intervals])
    gaps = [begin - end for (_, end), (begin, _) in itertools.pairwise(everything)]
    window = everything[-1][1] - everything[0][0]
    working = [one for name, theirs in busy.items() if name not in _WAITING for one in theirs]

    def per_step(microseconds: float) -> float:
        return round(microseconds / steps / 1e3, 4)

    categories = {}
    for name, intervals in sorted(busy.items(), key=lambda item: -length(item[1])):
        others = union([one for other, theirs in busy.items() if other != name for one in theirs])
        categories[name] = {
            "busy_ms": per_step(length(intervals)),
            "alone_ms": per_step(length(everything) - length(others)),
            "kernels": len(by_category[name]),
            "streams": len(streams[name]),
        }
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:12]
    return {
        "steps": steps,
        "step_ms": per_step(window),
        "busy_ms": per_step(length(everything)),
        "idle_ms": per_step(sum(gaps)),
        "gaps": gap_summary(gaps, steps),
        "waiting_ms": per_step(length(everything) - length(union(working))),
        "categories": categories,
        "longest_kernels": [
            {"name": name[:120], "category": category_of(name), "ms": per_step(sum(times)), "calls": len(times)}
            for name, times in longest
        ],
    }


def gap_summary(gaps: list[float], steps: int) -> dict[str, Any]:
    """Summarise ``gaps`` (microseconds): gaps per step, the longest gap, and number and time of long gaps per step."""
    long_ones = [gap for gap in gaps if gap > _LONG_GAP]
    return {
        "count": round(len(gaps) / steps, 1),
        "longest_us": round(max(gaps, default=0.0), 1),
        "long_count": round(len(long_ones) / steps, 1),
        "long_ms": round(sum(long_ones) / steps / 1e3, 4),
        "long_from_us": _LONG_GAP,
    }


def idle_without_profiler(found: dict[str, Any], step_ms: float) -> dict[str, float]:
    """Return idle time and shares for steps of ``step_ms`` without a profiler. ``found`` comes from ``breakdown``."""
    idle = max(0.0, step_ms - found["busy_ms"])
    return {
        "step_ms": step_ms,
        "idle_ms": round(idle, 4),
        "idle_share": round(idle / step_ms, 4),
        "idle_or_waiting_share": round((idle + found["waiting_ms"]) / step_ms, 4),
    }


def union(intervals: list[Interval]) -> list[Interval]:
    """Return the same time as sorted intervals that neither overlap nor touch."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(separate: list[Interval]) -> float:
    return sum(end - begin for begin, end in separate)
