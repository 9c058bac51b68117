"""What operators watch: SGLang's /metrics shows these with --enable-metrics."""

from __future__ import annotations

import functools
from typing import Any


class WorkerMetrics:
    """Of one scheduler process. Made after SGLang has said where processes put their metrics, never at import."""

    def __init__(self, rank: int) -> None:
        rows, up, starts = _collectors()
        self._rows = rows
        self._rank = str(rank)
        self._up = up.labels(rank=self._rank)
        self._starts = starts.labels(rank=self._rank)

    def served(self, by: str, rows: int) -> None:
        self._rows.labels(rank=self._rank, by=by).inc(rows)

    def worker_is(self, up: bool) -> None:
        self._up.set(up)
        if up:
            self._starts.inc()


class ScoutMetrics:
    """What policy scout leaves to the CPU."""

    _WEIGHT = 0.02  # of a new value: about the last fifty

    def __init__(self, rank: int) -> None:
        self._gauge = _ratio_gauge().labels(rank=str(rank))
        self._mean: float | None = None

    def ratio(self, _layer: int, ratio: float) -> None:
        self._mean = ratio if self._mean is None else self._mean + self._WEIGHT * (ratio - self._mean)
        self._gauge.set(self._mean)


@functools.cache
def _ratio_gauge() -> Any:
    from prometheus_client import Gauge

    return Gauge(
        "sglang_hybrid_cpu_compute_ratio",
        "Misses over budget, mean over layers and recent decode steps.",
        ["rank"],
        multiprocess_mode="mostrecent",
    )


@functools.cache
def _collectors() -> tuple[Any, Any, Any]:
    from prometheus_client import Counter, Gauge

    return (
        Counter(
            "sglang_hybrid_miss_rows",
            "Rows (one request in one layer) whose misses were served, by whom: worker, or this process and why.",
            ["rank", "by"],
        ),
        Gauge("sglang_hybrid_worker_up", "1 while a CPU worker is attached.", ["rank"], multiprocess_mode="mostrecent"),
        Counter("sglang_hybrid_worker_starts", "CPU workers that were attached.", ["rank"]),
    )
