"""What operators watch: SGLang's /metrics shows these with --enable-metrics.

table           every metric as data: name, type, labels, meaning, engines; docs/metrics.md is made from it
rank            whose metrics they are
collectors      Prometheus collectors of the table's metrics
distribution    values by bucket, counted here or on a device
readings        what an engine tells about itself
steps           how long decode steps take
waits           how long decode steps wait for the worker
layers          recent CPU compute ratio of each layer
worker          the CPU worker, and who serves misses: written when it happens
server          everything else of a scheduler process: written a few times a second
"""

from sglang_hybrid.metrics.rank import Rank
from sglang_hybrid.metrics.worker import WorkerMetrics

__all__ = ["Rank", "WorkerMetrics"]
