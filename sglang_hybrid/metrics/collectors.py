"""Prometheus collectors of the table's metrics.

A collector is created when the first value exists, never at import: SGLang chooses the directory of multiprocess
metrics first. A metric without a value is not exported.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang_hybrid.metrics.distribution import Distribution
from sglang_hybrid.metrics.rank import RANK_LABELS, Rank
from sglang_hybrid.metrics.table import BY_NAME


@functools.cache
def collector(name: str) -> Any:
    """Return this process's collector of a metric. Raise KeyError for a name that is not in the table."""
    metric = BY_NAME[name]
    import prometheus_client

    labels = [*RANK_LABELS, *metric.labels]
    if metric.kind == "counter":
        return prometheus_client.Counter(name, metric.meaning, labels)
    if metric.kind == "histogram":
        return prometheus_client.Histogram(name, metric.meaning, labels, buckets=metric.buckets)
    # ranks are processes with different labels: the newest value of each is shown
    return prometheus_client.Gauge(name, metric.meaning, labels, multiprocess_mode="mostrecent")


class Exporter:
    """Exports metric values of one rank."""

    def __init__(self, rank: Rank) -> None:
        self._labels = rank.labels
        self._children: dict[tuple[str, ...], Any] = {}

    def child(self, name: str, **labels: str) -> Any:
        """Return the child of a metric with these labels, exported from now on, as 0 until a value is set."""
        key = (name, *labels.values())
        if key not in self._children:
            self._children[key] = collector(name).labels(**self._labels, **labels)
        return self._children[key]

    def set(self, name: str, value: float, **labels: str) -> None:
        self.child(name, **labels).set(value)

    def add(self, name: str, amount: float, **labels: str) -> None:
        self.child(name, **labels).inc(amount)

    def observe(self, name: str, new: Distribution) -> None:
        """Add a histogram's values since the last call, all at once, as SGLang does for its own histograms."""
        child = self.child(name)
        for bucket, count in enumerate(new.counts):
            if count:
                child._buckets[bucket].inc(count)
        child._sum.inc(new.total)
