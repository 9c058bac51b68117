"""The JSON file of results, with its origin (commit, machine, command), like the files in ``bench/results``."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.worker.arguments import Settings
from bench.worker.results import Point, Results
from sglang_hybrid.origin import origin


def write(path: Path, results: Results, settings: Settings, host: dict[str, Any], argv: Sequence[str]) -> None:
    path.write_text(json.dumps(document(results, settings, host, argv), indent=1) + "\n")


def document(results: Results, settings: Settings, host: dict[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    return {
        "origin": {**origin(), "command": shlex.join(["python", "-m", "bench.worker", *argv])},
        "settings": {**dataclasses.asdict(settings), "out": str(settings.out)},
        "host": host,
        "read_bandwidth": {
            "host_gb_s": round(results.host_read, 2),
            "by_threads": [
                {
                    "threads": threads,
                    "gb_s": round(results.read(threads), 2),
                    "before_gb_s": round(before, 2),
                    "after_gb_s": round(results.read_after.get(threads, 0.0), 2),
                }
                for threads, before in results.read_before.items()
            ],
        },
        "attention": [_entry(results, point) for point in results.points if point.is_native],
        **{
            provider: [
                {**_entry(results, point), f"native_to_{provider}": round(results.native_to(point), 2)}
                for point in results.points
                if point.variant == provider
            ]
            for provider in settings.providers
        },
        "round_trip_us": _rounded(dataclasses.asdict(results.round_trip)) if results.round_trip else None,
        "notes": results.notes,
    }


def _entry(results: Results, point: Point) -> dict[str, Any]:
    rate = point.rate
    entry: dict[str, Any] = _rounded(
        {
            "dtype": point.dtype,
            "variant": point.variant,
            "threads": point.threads,
            "blocks_per_task": point.blocks,
            "median_gb_s": rate.median,
            "best_gb_s": rate.best,
            "read_beside_gb_s": results.read_beside(point),
            "percent_of_read_beside": 100 * rate.median / results.read_beside(point),
            "percent_of_read_with_same_threads": 100 * rate.median / results.read(point.threads),
            "percent_of_host_read": 100 * rate.median / results.host_read,
            "engine_gb_s": rate.engine,
            "stolen_tasks": rate.stolen,
            "posts": rate.posts,
            "rows": point.rows,
            "post_bytes": point.post_bytes,
        }
    )
    return entry


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 3) if isinstance(value, float) else value
