"""Histogram values: counts by bucket, and their sum, since some moment."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Distribution:
    counts: tuple[int, ...]  # of each bucket; the last one has no upper bound
    total: float  # sum of the values

    def since(self, before: Distribution | None) -> Distribution:
        """Return what was added after ``before``; everything if counting has restarted in between."""
        if before is None or sum(self.counts) < sum(before.counts):
            return self
        new = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Distribution(new, max(0.0, self.total - before.total))


class Buckets:
    """Counts values by bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: the highest value of each bucket except the last, which has no upper bound."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def distribution(self) -> Distribution:
        return Distribution(tuple(self._counts), self._total)
