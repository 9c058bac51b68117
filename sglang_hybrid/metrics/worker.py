"""Metrics of the CPU worker, and of who serves misses. The decode path and the worker's supervisor export them."""

from __future__ import annotations

from sglang_hybrid.metrics.collectors import Exporter
from sglang_hybrid.metrics.rank import Rank


class WorkerMetrics:
    """Metrics of one scheduler process. Create it after SGLang has set the directory of metrics, never at import."""

    def __init__(self, rank: Rank) -> None:
        self._exporter = Exporter(rank)
        self._up = self._exporter.child("sglang_hybrid_worker_up")
        self._starts = self._exporter.child("sglang_hybrid_worker_starts_total")
        self._degraded = self._exporter.child("sglang_hybrid_degraded")

    def served(self, by: str, rows: int) -> None:
        self._exporter.add("sglang_hybrid_miss_rows_total", rows, by=by)
        self._degraded.set(by != "worker")

    def worker_is(self, up: bool) -> None:
        self._up.set(up)
        self._degraded.set(not up)
        if up:
            self._starts.inc()
