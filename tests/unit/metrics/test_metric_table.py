"""The table of metrics agrees with the collectors and with the buckets of the CUDA kernels."""

from __future__ import annotations

import pytest

from sglang_hybrid.metrics.collectors import collector
from sglang_hybrid.metrics.rank import RANK_LABELS
from sglang_hybrid.metrics.table import BY_NAME, METRICS, WAIT_SECONDS, Metric
from sglang_hybrid.ops.cuda.structs import WAIT_BOUNDS

ENGINES = {"cpu", "torch", "cuda"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_complete_and_named_as_prometheus_wants_it(metric: Metric) -> None:
    assert metric.name.startswith("sglang_hybrid_") and metric.name.islower()
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram") and list(metric.buckets) == sorted(metric.buckets)
    assert metric.meaning and set(metric.engines) <= ENGINES and metric.engines
    assert not set(metric.labels) & set(RANK_LABELS)


def test_no_two_metrics_have_one_name() -> None:
    assert len(BY_NAME) == len(METRICS)
    series = [name for metric in METRICS for name in metric.series]
    assert len(set(series)) == len(series)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_collector_has_the_type_and_the_labels_of_the_table(metric: Metric) -> None:
    made = collector(metric.name)
    assert made is collector(metric.name)
    assert type(made).__name__.lower() == metric.kind
    assert made._labelnames == (*RANK_LABELS, *metric.labels)


def test_a_metric_that_is_not_in_the_table_has_no_collector() -> None:
    with pytest.raises(KeyError):
        collector("sglang_hybrid_surprise")


def test_the_kernels_count_waits_in_the_buckets_of_the_histogram() -> None:
    assert WAIT_SECONDS == WAIT_BOUNDS
