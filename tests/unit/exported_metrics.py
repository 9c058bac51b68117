"""Reads the metrics that this process exports for one rank."""

from __future__ import annotations

import itertools

from prometheus_client import REGISTRY

from sglang_hybrid.metrics import Rank

_ranks = itertools.count(5000)  # a new rank for each test: all tests of a process share its collectors


def new_rank() -> Rank:
    return Rank(next(_ranks), replica=3)


def value(rank: Rank, name: str, **labels: str) -> float | None:
    """Return the exported value of a metric, or None if the metric is not exported."""
    return REGISTRY.get_sample_value(name, rank.labels | labels)


def names(rank: Rank) -> set[str]:
    """Return the names of all metrics that have a value for this rank."""
    return {
        sample.name
        for family in REGISTRY.collect()
        for sample in family.samples
        if rank.labels.items() <= sample.labels.items() and not sample.name.endswith("_created")
    }
