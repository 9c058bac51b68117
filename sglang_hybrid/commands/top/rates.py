"""What happened between two readings: increases of counters, and the distribution of a histogram's new values.

A counter that fell or went away means that the server was restarted in between. Every counter then began again at zero,
and its value is its increase: a rate is never negative.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sglang_hybrid.commands.top import names
from sglang_hybrid.commands.top.point import Spread
from sglang_hybrid.commands.top.reading import Reading, Sample

_Series = tuple[str, tuple[tuple[str, str], ...]]  # name and labels
_MS = 1e3


@dataclass(frozen=True)
class Rates:
    """Of the time between two readings."""

    before: Reading
    after: Reading

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    @functools.cached_property
    def restarted(self) -> bool:
        """True if a counter fell or went away."""
        now = _counters(self.after)
        return any(now.get(series, -math.inf) < value for series, value in _counters(self.before).items())

    def increase(
        self, name: str, label: str, combine: Callable[[Iterable[float]], float] = math.fsum, **labels: str
    ) -> dict[str, float]:
        """Increases of a counter for each value of a label; ``combine`` makes one number of all ranks' ones."""
        before: Mapping[_Series, float] = {}
        if not self.restarted:
            before = {_series(name, sample): sample.value for sample in self.before.of(name, **labels)}
        grown: dict[str, list[float]] = defaultdict(list)
        for sample in self.after.of(name, **labels):
            grown[sample.labels.get(label, "")].append(sample.value - before.get(_series(name, sample), 0.0))
        return {key: combine(values) for key, values in sorted(grown.items())}

    def per_second(self, name: str, label: str) -> dict[str, float] | None:
        """Rates summed over ranks, for each value of a label; None if the counter is not exported."""
        if self.seconds <= 0 or not self.after.has(name):
            return None
        return {key: value / self.seconds for key, value in self.increase(name, label).items()}

    def per_replica(self, name: str, replica: str, **labels: str) -> float | None:
        """Rate of what all ranks of a replica count, such as tokens: the sum over replicas of the largest of a rank.

        ``replica`` is the label that tells replicas apart. None if the counter is not exported with these labels.
        """
        if self.seconds <= 0 or not self.after.of(name, **labels):
            return None
        return math.fsum(self.increase(name, replica, max, **labels).values()) / self.seconds

    def spread(self, histogram: str) -> Spread | None:
        """Mean and quantiles of the values that were observed in between; None without one."""
        count = sum(self.increase(f"{histogram}_count", "").values())
        if count <= 0:
            return None
        total = sum(self.increase(f"{histogram}_sum", "").values())
        buckets = {float(bound): grown for bound, grown in self.increase(f"{histogram}_bucket", "le").items()}
        return Spread(
            mean_ms=_MS * total / count,
            p50_ms=_in_ms(quantile(buckets, 0.5)),
            p99_ms=_in_ms(quantile(buckets, 0.99)),
        )


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Interpolate within the bucket, as Prometheus does. ``buckets``: cumulative counts by upper bound.

    Beyond the last finite bound nothing is known, and the bound is returned.
    """
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    wanted = share * buckets[bounds[-1]]
    for lower, upper in itertools.pairwise([0.0, *bounds]):
        below = buckets.get(lower, 0.0)
        if buckets[upper] >= wanted:
            if math.isinf(upper):
                return lower
            inside = buckets[upper] - below
            return lower + (upper - lower) * ((wanted - below) / inside if inside > 0 else 1.0)
    return bounds[-1]


def _series(name: str, sample: Sample) -> _Series:
    return name, tuple(sorted(sample.labels.items()))


def _counters(reading: Reading) -> dict[_Series, float]:
    counted = (*names.COUNTERS, *(f"{name}_count" for name in names.HISTOGRAMS))
    return {_series(name, sample): sample.value for name in counted for sample in reading.of(name)}


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else _MS * seconds
