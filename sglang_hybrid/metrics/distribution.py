"""Values by bucket: what a histogram is made of, added up since some moment."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Distribution:
    counts: tuple[int, ...]  # of each bucket; the last one has no upper bound
    total: float  # sum of the values

    def since(self, before: Distribution | None) -> Distribution:
        """What came after ``before``; everything if that was counted by somebody else, who has begun anew."""
        if before is None or sum(self.counts) < sum(before.counts):
            return self
        new = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Distribution(new, max(0.0, self.total - before.total))


class Buckets:
    """Counts values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: the highest value of each bucket but the last."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def distribution(self) -> Distribution:
        return Distribution(tuple(self._counts), self._total)
