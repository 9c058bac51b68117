"""Rates, quantiles and sums over ranks of ``sglang-hybrid top``: arithmetic on readings, without a server."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.commands.top import names
from sglang_hybrid.commands.top.colours import SHADES, colour, shade, top_of_scale
from sglang_hybrid.commands.top.derive import latest_of, point_of
from sglang_hybrid.commands.top.quantities import milliseconds, number, percent, size, sparkline
from sglang_hybrid.commands.top.rates import Rates, quantile
from sglang_hybrid.commands.top.reading import Reading, parse


def reading(text: str, at: float = 0.0) -> Reading:
    return parse(text, at, 1_000_000.0 + at)


def rates(before: str, after: str, seconds: float = 2.0) -> Rates:
    return Rates(reading(before), reading(after, seconds))


def miss_bytes(**paths: float) -> str:
    return "".join(f'{names.MISS_BYTES}{{rank="0",path="{path}"}} {value}\n' for path, value in paths.items())


def test_a_counters_rate_is_its_increase_over_the_time() -> None:
    found = rates(miss_bytes(worker=1e9, gather=5e9), miss_bytes(worker=4e9, gather=5e9))
    assert found.per_second(names.MISS_BYTES, "path") == {"gather": 0.0, "worker": 1.5e9}
    assert not found.restarted


def test_a_series_that_appears_counts_from_zero() -> None:
    found = rates(miss_bytes(worker=10), miss_bytes(worker=10, device=6))
    assert found.per_second(names.MISS_BYTES, "path") == {"device": 3.0, "worker": 0.0}


def test_a_counter_that_fell_makes_all_counters_begin_at_zero() -> None:
    before = miss_bytes(worker=100, gather=3)
    found = rates(before, miss_bytes(worker=10, gather=8))
    assert found.restarted
    assert found.per_second(names.MISS_BYTES, "path") == {"gather": 4.0, "worker": 5.0}


def test_a_counter_that_went_away_means_a_restart_too() -> None:
    found = rates(miss_bytes(worker=100, gather=3), miss_bytes(worker=100))
    assert found.restarted
    assert found.per_second(names.MISS_BYTES, "path") == {"worker": 50.0}


@given(st.lists(st.tuples(*[st.floats(0, 1e12) | st.none()] * 3), min_size=2, max_size=6))
def test_no_rate_is_ever_negative(history: list[tuple[float | None, ...]]) -> None:
    readings = [
        reading(miss_bytes(**{f"p{i}": value for i, value in enumerate(values) if value is not None}), at)
        for at, values in enumerate(history)
    ]
    for before, after in itertools.pairwise(readings):
        found = Rates(before, after).per_second(names.MISS_BYTES, "path") or {}
        assert all(rate >= 0 for rate in found.values())


def test_two_readings_at_the_same_moment_have_no_rate() -> None:
    assert rates(miss_bytes(worker=1), miss_bytes(worker=2), seconds=0).per_second(names.MISS_BYTES, "path") is None


def test_a_counter_that_is_not_exported_has_no_rate() -> None:
    assert rates("", miss_bytes(worker=1)).per_second(names.RECALL_BYTES, "") is None


def histogram(counts: dict[str, int], total: float) -> str:
    name = names.WORKER_WAIT
    lines = [f'{name}_bucket{{rank="0",le="{bound}"}} {count}' for bound, count in counts.items()]
    return "\n".join([*lines, f'{name}_sum{{rank="0"}} {total}', f'{name}_count{{rank="0"}} {counts["+Inf"]}', ""])


def test_a_histograms_new_values_have_a_mean_and_quantiles() -> None:
    before = histogram({"0.001": 90, "0.002": 90, "+Inf": 100}, 7.0)
    after = histogram({"0.001": 90, "0.002": 190, "+Inf": 200}, 7.15)
    spread = rates(before, after).spread(names.WORKER_WAIT)
    assert spread is not None
    assert spread.mean_ms == pytest.approx(1.5)
    assert spread.p50_ms == pytest.approx(1.5)
    assert spread.p99_ms == pytest.approx(1.99)


def test_a_histogram_without_new_values_has_no_spread() -> None:
    text = histogram({"0.001": 90, "+Inf": 100}, 7.0)
    assert rates(text, text).spread(names.WORKER_WAIT) is None
    assert rates("", "").spread(names.WORKER_WAIT) is None


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert quantile({1.0: 1, 2.0: 2, math.inf: 100}, 0.99) == 2.0
    assert quantile({1.0: 10, math.inf: 10}, 0.5) == 0.5
    assert quantile({}, 0.5) is None
    assert quantile({1.0: 0, math.inf: 0}, 0.5) is None


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.floats(0.01, 0.99))
def test_a_quantile_lies_within_the_bounds(counts: list[int], share: float) -> None:
    bounds = [*(float(i + 1) for i in range(len(counts) - 1)), math.inf]
    cumulative = {bound: float(sum(counts[: i + 1])) for i, bound in enumerate(bounds)}
    found = quantile(cumulative, share)
    assert (found is None) == (sum(counts) == 0)
    assert found is None or 0 <= found <= len(counts)


RANKS = """\
sglang:num_running_reqs{tp_rank="0",dp_rank="0",priority=""} 3
sglang:num_running_reqs{tp_rank="0",dp_rank="0",priority="7"} 3
sglang:num_running_reqs{tp_rank="1",dp_rank="0"} 3
sglang:num_running_reqs{tp_rank="0",dp_rank="1"} 4
sglang_hybrid_decode_rows{replica="0",rank="0"} 3
sglang_hybrid_decode_rows{replica="0",rank="1"} 3
sglang_hybrid_decode_rows{replica="1",rank="0"} 4
sglang_hybrid_host_pool_bytes{replica="0",rank="0"} 100
sglang_hybrid_host_pool_bytes{replica="0",rank="1"} 100
sglang_hybrid_layer_cpu_compute_ratio{replica="0",rank="0",layer="0"} 0.25
sglang_hybrid_layer_cpu_compute_ratio{replica="0",rank="1",layer="0"} 0.75
sglang_hybrid_layer_cpu_compute_ratio{replica="0",rank="0",layer="2"} NaN
sglang_hybrid_layer_cpu_compute_ratio{replica="0",rank="0",layer="3"} 0.125
sglang_hybrid_layer_cpu_compute_ratio{replica="0",rank="0",layer="9999999999"} 1
sglang_hybrid_worker_up{replica="0",rank="10"} 1
sglang_hybrid_worker_up{replica="0",rank="2"} 0
sglang_hybrid_worker_starts_total{replica="0",rank="2"} 4
sglang_hybrid_degraded{replica="0",rank="2"} 1
"""


def test_ranks_of_a_replica_count_the_same_requests_and_their_own_memory() -> None:
    point = point_of(1, reading(RANKS), None)
    assert (point.running, point.rows, point.pool_bytes) == (7, 7, 200)


def test_layers_are_means_over_ranks_with_gaps_for_unknown_ones() -> None:
    assert point_of(1, reading(RANKS), None).layer_cpu_ratio == (0.5, None, None, 0.125)


def test_workers_are_listed_in_the_order_of_their_ranks() -> None:
    workers = latest_of(reading(RANKS)).workers
    assert [(worker.rank, worker.up, worker.restarts, worker.degraded) for worker in workers] == [
        ("2", False, 3, True),
        ("10", True, None, None),
    ]


def test_what_is_not_exported_is_named() -> None:
    latest = latest_of(reading(RANKS))
    assert names.POOL not in latest.not_exported
    assert {names.SLOTS, names.WORKER_WAIT, names.INFO} <= set(latest.not_exported)


def test_tokens_come_from_the_counter_and_without_one_from_sglangs_own_mean() -> None:
    mean = 'sglang:gen_throughput{dp_rank="0"} 11\nsglang:gen_throughput{dp_rank="1"} 12\n'

    def counted(mode: str, tokens: int, at: float = 0.0) -> Reading:
        return reading(f'{mean}sglang:realtime_tokens_total{{dp_rank="0",mode="{mode}"}} {tokens}\n', at)

    assert point_of(1, reading(mean), None).tokens_per_s == 23
    before, after = counted("decode", 100), counted("decode", 160, 2.0)
    assert point_of(2, after, Rates(before, after)).tokens_per_s == 30
    before, after = counted("prefill_compute", 0), counted("prefill_compute", 160, 2.0)
    assert point_of(2, after, Rates(before, after)).tokens_per_s == 23


def test_text_that_is_not_prometheus_is_an_error() -> None:
    with pytest.raises(ValueError):
        reading("<html>hello</html>")


@pytest.mark.parametrize(("largest", "top"), [(0.0, 0.1), (0.1, 0.1), (0.11, 0.2), (0.3, 0.5), (0.9, 1.0), (1.2, 2.0)])
def test_a_scale_ends_at_a_round_number(largest: float, top: float) -> None:
    assert top_of_scale([None, largest], 0.1) == pytest.approx(top)


@given(st.floats(allow_nan=False))
def test_every_number_has_a_colour_and_a_shade(share: float) -> None:
    assert all(0 <= part <= 255 for part in colour(share))
    assert shade(share) in SHADES


def test_numbers_are_written_with_their_units() -> None:
    assert (number(None), number(1234.5, 1), number(2, 2, "GB/s")) == ("-", "1,234.5", "2.00 GB/s")
    assert (percent(0.123), percent(None)) == ("12.3 %", "-")
    assert (milliseconds(0.1234), milliseconds(1234.0)) == ("0.123 ms", "1,234 ms")
    assert (size(512), size(3 << 30), size(None)) == ("512 B", "3.0 GiB", "-")
    assert sparkline([1, None, 8, 4], 5) == " ▂ █▅"


def test_what_served_before_is_not_shown_as_what_serves() -> None:
    text = 'sglang_hybrid_info{engine="cuda",rank="0"} 0\nsglang_hybrid_info{engine="torch",rank="0"} 1\n'
    assert latest_of(reading(text)).info == {"engine": "torch"}
    assert latest_of(reading("")).info == {}


def test_every_metric_of_ours_that_is_shown_is_one_that_engines_export() -> None:
    table = pytest.importorskip("sglang_hybrid.metrics.table", reason="this server has no table of metrics")
    assert {name for name in names.SHOWN if name.startswith(names.HYBRID)} <= table.BY_NAME.keys()


def test_ranks_of_a_replica_count_the_same_tokens() -> None:
    line = 'sglang:realtime_tokens_total{{mode="decode",tp_rank="{}",dp_rank="{}"}} {}\n'
    before = line.format(0, 0, 0) + line.format(1, 0, 0) + line.format(2, 1, 10)
    after = line.format(0, 0, 40) + line.format(1, 0, 40) + line.format(2, 1, 30)
    assert rates(before, after).per_replica(names.TOKENS, "dp_rank", mode="decode") == 30
    assert rates(before, after).per_replica(names.TOKENS, "dp_rank", mode="prefill_compute") is None
