"""Every metric as data. Collectors, docs/metrics.md and tests are made from this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
# misses: a policy with misses, such as scout; worker: a worker that serves misses; calibration: a calibrated predictor
When = Literal["", "misses", "worker", "calibration"]
PATHS = ("worker", "gather", "device", "process")  # values of the label path

WAIT_SECONDS = tuple(10_000 * 2**number / 1e9 for number in range(15))  # as the CUDA kernels count them
STEP_SECONDS = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0,
    5.0,
)  # fmt: skip

_ALL = ("cpu", "torch", "cuda")
_MISSES = ("torch", "cuda")  # engines with a resident set, and so with misses
_CUDA = ("cuda",)


@dataclass(frozen=True)
class Metric:
    """One metric. Every metric also has the labels ``replica`` and ``rank``."""

    name: str  # as exported; buckets, sums and counts of histograms have suffixes
    kind: Kind
    meaning: str
    engines: tuple[str, ...]  # engines that know the value: cpu, torch, cuda
    labels: tuple[str, ...] = ()
    when: When = ""  # a further condition; nothing is exported without it
    buckets: tuple[float, ...] = ()  # upper bounds, of a histogram

    @property
    def series(self) -> tuple[str, ...]:
        """Return the names of the metric's time series."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


METRICS = (
    Metric(
        "sglang_hybrid_info", "gauge", "1; the labels say what serves", _ALL,
        ("version", "sglang", "policy", "engine", "prediction"),
    ),
    Metric(
        "sglang_hybrid_decode_step_seconds", "histogram",
        "time from the start of a decode step to the next batch or idleness", _ALL,
        buckets=STEP_SECONDS,
    ),
    Metric("sglang_hybrid_decode_rows", "gauge", "rows of the last decode step, 0 when idle", _ALL),
    Metric("sglang_hybrid_host_pool_bytes", "gauge", "KV cache that the host pool can hold", _ALL),
    Metric(
        "sglang_hybrid_host_pool_used_bytes", "gauge",
        "KV cache of running requests, without cached prefixes that can be evicted", _ALL,
    ),
    Metric(
        "sglang_hybrid_cpu_compute_ratio", "gauge", "misses over budget, mean over layers and recent steps", _MISSES,
        when="misses",
    ),
    Metric(
        "sglang_hybrid_layer_cpu_compute_ratio", "gauge", "misses over budget of a layer, mean over recent steps",
        _MISSES, ("layer",), when="misses",
    ),
    Metric(
        "sglang_hybrid_layer_recall_interval_steps", "gauge",
        "decode steps between two recalls at present; 0: never", _MISSES, ("layer",), when="misses",
    ),
    Metric(
        "sglang_hybrid_resident_hit_ratio", "gauge",
        "share of selected blocks that were resident, without always attended ones; recent mean", _MISSES,
        when="misses",
    ),
    Metric(
        "sglang_hybrid_miss_blocks_total", "counter",
        "missed blocks; `path`: computed by the `worker`, copied to the GPU (`gather`), read from host memory by the "
        "GPU (`device`), computed in the server's `process`", _MISSES, ("path",), when="misses",
    ),
    Metric(
        "sglang_hybrid_miss_bytes_total", "counter", "keys and values of missed blocks, by the same `path`", _MISSES,
        ("path",), when="misses",
    ),
    Metric(
        "sglang_hybrid_recall_bytes_total", "counter", "keys and values that recalls copied to the GPU", _CUDA,
        when="misses",
    ),
    Metric(
        "sglang_hybrid_miss_rows_total", "counter",
        "rows of a layer whose misses were served; `by` is `worker`, or `process-` or `device-` with the reason: "
        "`no-worker`, `late`, `behind`, `damaged`, `overwritten`", _MISSES, ("by",), when="worker",
    ),
    Metric(
        "sglang_hybrid_worker_wait_seconds", "histogram",
        "time that a decode step waited for the worker, over all layers; a GPU attends meanwhile",
        _MISSES, when="worker", buckets=WAIT_SECONDS,
    ),
    Metric("sglang_hybrid_worker_up", "gauge", "1 while a worker is attached", _MISSES, when="worker"),
    Metric("sglang_hybrid_worker_starts_total", "counter", "workers that were attached", _MISSES, when="worker"),
    Metric(
        "sglang_hybrid_degraded", "gauge", "1 while the server computes in the worker's place", _MISSES, when="worker"
    ),
    Metric("sglang_hybrid_slots", "gauge", "blocks of a layer and KV head that GPU memory can hold", _CUDA),
    Metric(
        "sglang_hybrid_slots_used", "gauge",
        "blocks of a layer and KV head that rows of the last step can have there", _CUDA,
    ),
    Metric(
        "sglang_hybrid_whole_requests", "gauge", "1 while all running requests are wholly in GPU memory", _CUDA
    ),
    Metric(
        "sglang_hybrid_calibration_cosine", "gauge",
        "cosine of predicted and real queries at calibration", _MISSES, ("layer",),
        when="calibration",
    ),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in METRICS}
