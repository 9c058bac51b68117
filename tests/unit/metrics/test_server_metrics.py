"""Metrics of a scheduler process: published rarely, only those that its engine has, and at once when it is idle."""

from __future__ import annotations

import pytest
from exported_metrics import names, new_rank, value

from sglang_hybrid.metrics.distribution import Distribution
from sglang_hybrid.metrics.readings import Readings
from sglang_hybrid.metrics.server import PUBLISH_SECONDS, ServerMetrics
from sglang_hybrid.metrics.table import WAIT_SECONDS

GIB = 1 << 30


class Server:
    """A server's metrics, with a clock and an engine's readings that a test sets."""

    def __init__(self) -> None:
        self.rank = new_rank()
        self.now, self.readings, self.reads, self.used = 100.0, Readings(), 0, GIB
        self.metrics = ServerMetrics(self.rank, self._read, lambda: self.now)

    def _read(self) -> Readings:
        self.reads += 1
        return self.readings

    def _pool(self) -> tuple[int, int]:
        return self.used, 4 * GIB

    def batch(self, decoded_rows: int | None, after: float = PUBLISH_SECONDS) -> None:
        self.now += after
        self.metrics.batch_begins(decoded_rows, self._pool)

    def rest(self, after: float = 0.0) -> None:
        self.now += after
        self.metrics.rests(self._pool)

    def value(self, name: str, **labels: str) -> float | None:
        return value(self.rank, f"sglang_hybrid_{name}", **labels)


def waits(*counts: int, total: float) -> Distribution:
    return Distribution((*counts, *[0] * (len(WAIT_SECONDS) + 1 - len(counts))), total)


def test_what_an_engine_cannot_tell_is_not_exported() -> None:
    server = Server()
    server.batch(4)
    server.batch(None)
    of_steps = {f"sglang_hybrid_decode_step_seconds_{part}" for part in ("bucket", "sum", "count")}
    of_pool = {"sglang_hybrid_host_pool_bytes", "sglang_hybrid_host_pool_used_bytes"}
    assert names(server.rank) == of_steps | of_pool | {"sglang_hybrid_decode_rows"}


def test_a_server_that_has_not_decoded_says_nothing_of_steps() -> None:
    server = Server()
    server.batch(None)
    server.rest()
    assert names(server.rank) == {"sglang_hybrid_host_pool_bytes", "sglang_hybrid_host_pool_used_bytes"}
    assert server.value("host_pool_used_bytes") == GIB and server.value("host_pool_bytes") == 4 * GIB


def test_many_steps_are_published_together() -> None:
    server = Server()
    for _ in range(1000):
        server.batch(3, after=0.002)
    assert server.reads == pytest.approx(1000 * 0.002 / PUBLISH_SECONDS, abs=1)
    server.rest(after=0.002)
    assert server.value("decode_step_seconds_count") == 1000
    assert server.value("decode_step_seconds_sum") == pytest.approx(2.0)
    # each step takes 2 ms, up to rounding of the clock's float
    assert server.value("decode_step_seconds_bucket", le="0.001") == 0
    assert server.value("decode_step_seconds_bucket", le="0.003") == 1000


def test_a_step_lasts_until_the_next_batch_and_pauses_are_none() -> None:
    server = Server()
    server.batch(2)
    server.batch(None, after=0.012)  # a prefill is no decode step
    server.batch(2, after=3.0)
    server.rest(after=0.008)
    server.batch(2, after=60.0)
    server.rest(after=0.008)
    assert server.value("decode_step_seconds_count") == 3
    assert server.value("decode_step_seconds_sum") == pytest.approx(0.028)


def test_an_idle_server_has_no_rows_and_fills_no_slots() -> None:
    server = Server()
    server.readings = Readings(slots=640, slots_used=120, holds_whole_requests=True)
    server.batch(7)
    assert server.value("decode_rows") == 7
    assert (server.value("slots_used"), server.value("slots"), server.value("whole_requests")) == (120, 640, 1)
    server.used = 0
    server.rest()
    assert server.value("decode_rows") == 0 == server.value("host_pool_used_bytes")
    assert (server.value("slots_used"), server.value("slots")) == (0, 640)


def test_a_server_that_rests_publishes_now_and_then() -> None:
    server = Server()
    server.batch(1)
    for _ in range(1000):
        server.rest(after=0.001)
    assert server.reads == pytest.approx(1 + 1.0 / PUBLISH_SECONDS, abs=1)


def test_blocks_are_counted_by_path_with_their_bytes() -> None:
    server = Server()
    for blocks in (10, 10, 25):
        server.readings = Readings(
            miss_blocks={"worker": blocks, "process": 2}, recalled_blocks=4 * blocks, block_bytes=1000
        )
        server.batch(1)
    assert server.value("miss_blocks_total", path="worker") == 25
    assert server.value("miss_bytes_total", path="worker") == 25_000
    assert server.value("miss_bytes_total", path="process") == 2000
    assert server.value("miss_blocks_total", path="gather") is None
    assert server.value("recall_bytes_total") == 100_000


def test_an_engine_that_begins_anew_counts_on() -> None:
    server = Server()
    for blocks, waited in ((10, waits(3, total=3e-6)), (4, waits(1, total=1e-6))):
        server.readings = Readings(miss_blocks={"device": blocks}, block_bytes=1, waits=waited)
        server.batch(1)
    assert server.value("miss_blocks_total", path="device") == 14
    assert server.value("worker_wait_seconds_count") == 4


def test_waits_keep_their_buckets() -> None:
    server = Server()
    for waited in (waits(1, 0, 4, total=2e-4), waits(2, 0, 9, 1, total=6e-4)):
        server.readings = Readings(waits=waited)
        server.batch(1)
    bounds = [f"{bound}" for bound in WAIT_SECONDS[:4]]
    assert [server.value("worker_wait_seconds_bucket", le=bound) for bound in bounds] == [2, 2, 11, 12]
    assert server.value("worker_wait_seconds_bucket", le="+Inf") == 12
    assert server.value("worker_wait_seconds_sum") == pytest.approx(6e-4)


def test_the_hit_ratio_is_that_of_recent_selections() -> None:
    server = Server()
    server.readings = Readings(selected_blocks=0, resident_blocks=0)
    server.batch(1)
    assert server.value("resident_hit_ratio") is None  # nothing was selected yet
    for step in range(1, 60):
        server.readings = Readings(selected_blocks=100 * step, resident_blocks=80 * step)
        server.batch(1)
    assert server.value("resident_hit_ratio") == pytest.approx(0.8)
    server.batch(1)  # no new selections
    for step in range(1, 60):
        server.readings = Readings(selected_blocks=5900 + 100 * step, resident_blocks=4720 + 50 * step)
        server.batch(1)
    assert server.value("resident_hit_ratio") == pytest.approx(0.5, abs=0.01)


def test_each_layer_has_its_ratio_and_all_of_them_a_mean() -> None:
    server = Server()
    server.batch(1)
    assert server.value("cpu_compute_ratio") is None
    for _ in range(100):
        server.metrics.layers.ratio(0, 0.1)
        server.metrics.layers.ratio(1, 0.3)
    server.batch(1)
    assert server.value("layer_cpu_compute_ratio", layer="0") == pytest.approx(0.1)
    assert server.value("layer_cpu_compute_ratio", layer="1") == pytest.approx(0.3)
    assert server.value("cpu_compute_ratio") == pytest.approx(0.2)
    for _ in range(100):
        server.metrics.layers.ratio(0, 0.5)
    server.batch(1)
    assert server.value("cpu_compute_ratio") == pytest.approx(0.4, abs=0.001)


def test_intervals_are_those_of_the_controller_now() -> None:
    server = Server()
    for intervals in ((8, 8), (8, 8), (5, 8)):
        server.readings = Readings(recall_intervals=intervals)
        server.batch(1)
    assert [server.value("layer_recall_interval_steps", layer=layer) for layer in "01"] == [5, 8]


def test_what_serves_is_said_once_and_what_served_before_is_0() -> None:
    server = Server()
    labels = {"version": "1", "sglang": "2", "policy": "scout", "engine": "cuda", "prediction": "calibrated"}
    server.metrics.serves(labels)
    server.metrics.serves(labels)
    assert server.value("info", **labels) == 1
    changed = labels | {"prediction": "none"}
    server.metrics.serves(changed)
    assert (server.value("info", **labels), server.value("info", **changed)) == (0, 1)


def test_a_calibration_tells_the_cosine_of_each_layer() -> None:
    server = Server()
    server.metrics.calibrated({1: 0.98, 2: 0.95})
    assert [server.value("calibration_cosine", layer=layer) for layer in "012"] == [None, 0.98, 0.95]
