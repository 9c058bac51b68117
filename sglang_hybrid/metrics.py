"""What operators watch: SGLang's /metrics shows these with --enable-metrics."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

_RANK = ["replica", "rank"]  # labels of everything here


@dataclass(frozen=True)
class Rank:
    """Whose metrics: a rank of tensor parallelism, and the replica of the model that it belongs to."""

    rank: int = 0
    replica: int = 0

    @property
    def labels(self) -> dict[str, str]:
        return {"replica": str(self.replica), "rank": str(self.rank)}


class WorkerMetrics:
    """Of one scheduler process. Made after SGLang has said where processes put their metrics, never at import."""

    def __init__(self, rank: Rank) -> None:
        self._labels = rank.labels
        self._rows, up, starts, degraded = _collectors()
        self._up = up.labels(**self._labels)
        self._starts = starts.labels(**self._labels)
        self._degraded = degraded.labels(**self._labels)

    def served(self, by: str, rows: int) -> None:
        self._rows.labels(**self._labels, by=by).inc(rows)
        self._degraded.set(by != "worker")

    def worker_is(self, up: bool) -> None:
        self._up.set(up)
        self._degraded.set(not up)
        if up:
            self._starts.inc()


class ScoutMetrics:
    """What policy scout leaves to the CPU."""

    _WEIGHT = 0.02  # of a new value: about the last fifty

    def __init__(self, rank: Rank) -> None:
        self._gauge = _ratio_gauge().labels(**rank.labels)
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
        _RANK,
        multiprocess_mode="mostrecent",
    )


@functools.cache
def _collectors() -> tuple[Any, Any, Any, Any]:
    from prometheus_client import Counter, Gauge

    return (
        Counter(
            "sglang_hybrid_miss_rows",
            "Rows (one request in one layer) whose misses were served, by whom: worker, or this process and why.",
            [*_RANK, "by"],
        ),
        Gauge("sglang_hybrid_worker_up", "1 while a CPU worker is attached.", _RANK, multiprocess_mode="mostrecent"),
        Counter("sglang_hybrid_worker_starts", "CPU workers that were attached.", _RANK),
        Gauge(
            "sglang_hybrid_degraded",
            "1 while the server computes in the worker's place: answers are right, and slower.",
            _RANK,
            multiprocess_mode="mostrecent",
        ),
    )
