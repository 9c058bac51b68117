"""Metrics for operators: SGLang exports them at /metrics with --enable-metrics.

table           every metric as data: name, type, labels, meaning, engines; docs/metrics.md is made from it
rank            labels of the rank that a value belongs to
collectors      Prometheus collectors of the table's metrics
distribution    histogram values by bucket, counted on the host or on a device
readings        counters and state that an engine reports
steps           how long decode steps take
waits           how long decode steps wait for the worker
layers          recent CPU compute ratio of each layer
worker          state of the CPU worker, and who serves misses: exported at each event
server          all other metrics of a scheduler process: exported a few times a second
"""

from sglang_hybrid.metrics.rank import Rank
from sglang_hybrid.metrics.worker import WorkerMetrics

__all__ = ["Rank", "WorkerMetrics"]
