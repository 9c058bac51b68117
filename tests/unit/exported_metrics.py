"""What this process exports of one rank."""

from __future__ import annotations

import itertools

from prometheus_client import REGISTRY

from sglang_hybrid.metrics import Rank

_ranks = itertools.count(5000)  # one for each test: collectors are of the whole process


def new_rank() -> Rank:
    return Rank(next(_ranks), replica=3)


def value(rank: Rank, name: str, **labels: str) -> float | None:
    """None: not exported."""
    return REGISTRY.get_sample_value(name, rank.labels | labels)


def names(rank: Rank) -> set[str]:
    """Of all metrics with a value of this rank."""
    return {
        sample.name
        for family in REGISTRY.collect()
        for sample in family.samples
        if rank.labels.items() <= sample.labels.items() and not sample.name.endswith("_created")
    }
