"""Metrics that a scheduler process publishes a few times a second: steps, layers, blocks, memory, engine in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from sglang_hybrid.metrics.collectors import Exporter
from sglang_hybrid.metrics.distribution import Distribution
from sglang_hybrid.metrics.layers import LayerRatios, RecentMean
from sglang_hybrid.metrics.rank import Rank
from sglang_hybrid.metrics.readings import Readings
from sglang_hybrid.metrics.steps import StepClock

PUBLISH_SECONDS = 0.25  # at least, between two publications
_WEIGHT_OF_HITS = 0.2  # of the hit ratio since the last publication, in the moving average


class ServerMetrics:
    """Metrics of one model runner. Only the scheduler's thread may call methods.

    ``batch_begins`` and ``rests`` record values. They publish if the last publication is long enough ago, and at once
    when the server becomes idle. Values that the engine does not know are not exported.
    """

    def __init__(self, rank: Rank, read: Callable[[], Readings], clock: Callable[[], float] = time.monotonic) -> None:
        """``read`` returns the readings of the engine that is in use."""
        self._export, self._read, self._clock = Exporter(rank), read, clock
        self.layers = LayerRatios()
        self._steps = StepClock()
        self._hits = RecentMean(_WEIGHT_OF_HITS)
        self._next = 0.0  # earliest time of the next publication
        self._is_idle = False
        self._counted: dict[tuple[str, str], float] = {}  # counters at the last publication, by name and path
        self._seen: dict[str, Distribution] = {}  # histograms at the last publication, by name
        self._intervals: tuple[int, ...] | None = None
        self._served_by: Mapping[str, str] | None = None

    # -- what serves -------------------------------------------------------------------------

    def serves(self, by: Mapping[str, str]) -> None:
        """Export the info metric with the labels ``by``, and set the one with the previous labels to 0."""
        if self._served_by is not None and self._served_by != by:
            self._export.set("sglang_hybrid_info", 0, **self._served_by)
        self._export.set("sglang_hybrid_info", 1, **by)
        self._served_by = dict(by)

    def calibrated(self, cosines: Mapping[int, float]) -> None:
        """Export the cosine of predicted and real queries, by layer."""
        for layer, cosine in cosines.items():
            self._export.set("sglang_hybrid_calibration_cosine", cosine, layer=str(layer))

    # -- batches -----------------------------------------------------------------------------

    def batch_begins(self, decoded_rows: int | None, pool: Callable[[], tuple[int, int]]) -> None:
        """Record that a batch begins, and publish if it is time.

        ``decoded_rows``: None for a prefill. ``pool`` returns the bytes that requests hold, and the pool's size.
        """
        now, self._is_idle = self._clock(), False
        self._steps.batch_begins(decoded_rows, now)
        if now >= self._next:
            self._publish(now, pool())

    def rests(self, pool: Callable[[], tuple[int, int]]) -> None:
        """Record that no batch runs, and publish if it is time. Called repeatedly while the server is idle."""
        now, was_idle = self._clock(), self._is_idle
        if was_idle and now < self._next:
            return
        self._is_idle = True
        self._steps.rests(now)
        self._publish(now, pool())

    # -- publishing --------------------------------------------------------------------------

    def _publish(self, now: float, pool: tuple[int, int]) -> None:
        self._next = now + PUBLISH_SECONDS
        used, size = pool
        self._export.set("sglang_hybrid_host_pool_used_bytes", used)
        self._export.set("sglang_hybrid_host_pool_bytes", size)
        if self._steps.rows is not None:
            self._export.set("sglang_hybrid_decode_rows", self._steps.rows)
            self._observe("sglang_hybrid_decode_step_seconds", self._steps.seconds)
        read = self._read()
        self._publish_layers(read)
        self._publish_blocks(read)
        if read.waits is not None:
            self._observe("sglang_hybrid_worker_wait_seconds", read.waits)
        if read.slots is not None:
            self._export.set("sglang_hybrid_slots", read.slots)
            self._export.set("sglang_hybrid_slots_used", 0 if self._is_idle else read.slots_used)
        if read.holds_whole_requests is not None:
            self._export.set("sglang_hybrid_whole_requests", read.holds_whole_requests)

    def _publish_layers(self, read: Readings) -> None:
        if ratios := self.layers.take_new():
            for layer, ratio in ratios.items():
                self._export.set("sglang_hybrid_layer_cpu_compute_ratio", ratio, layer=str(layer))
            self._export.set("sglang_hybrid_cpu_compute_ratio", sum(ratios.values()) / len(ratios))
        if read.recall_intervals is not None and read.recall_intervals != self._intervals:
            self._intervals = read.recall_intervals
            for layer, interval in enumerate(read.recall_intervals):
                self._export.set("sglang_hybrid_layer_recall_interval_steps", interval, layer=str(layer))

    def _publish_blocks(self, read: Readings) -> None:
        for path, blocks in (read.miss_blocks or {}).items():
            new = self._count("sglang_hybrid_miss_blocks_total", blocks, path)
            self._export.add("sglang_hybrid_miss_blocks_total", new, path=path)
            self._export.add("sglang_hybrid_miss_bytes_total", new * read.block_bytes, path=path)
        if read.recalled_blocks is not None:
            new = self._count("sglang_hybrid_recall_bytes_total", read.recalled_blocks)
            self._export.add("sglang_hybrid_recall_bytes_total", new * read.block_bytes)
        if read.selected_blocks is None or read.resident_blocks is None:
            return
        selected = self._count("selected", read.selected_blocks)
        resident = self._count("resident", read.resident_blocks)
        if selected:
            self._hits.add(resident / selected)
        if self._hits.value is not None:
            self._export.set("sglang_hybrid_resident_hit_ratio", self._hits.value)

    def _count(self, name: str, total: int, path: str = "") -> float:
        """Return what was added to ``total`` since the last call. A new engine counts from 0 again."""
        before = self._counted.get((name, path), 0)
        self._counted[name, path] = total
        return total - before if total >= before else total

    def _observe(self, name: str, values: Distribution) -> None:
        self._export.observe(name, values.since(self._seen.get(name)))
        self._seen[name] = values
