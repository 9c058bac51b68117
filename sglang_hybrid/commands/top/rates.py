"""Changes between two readings: increases of counters, and the distribution of a histogram's new values.

A counter that fell or disappeared means that the server was restarted in between. Every counter then restarted at zero,
and its value is its increase, so a rate is never negative.
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
    """Rates over the time between two readings of one server."""

    before: Reading
    after: Reading

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    @functools.cached_property
    def restarted(self) -> bool:
        """True if a counter fell or disappeared, so that the server was restarted."""
        now = _counters(self.after)
        return any(now.get(series, -math.inf) < value for series, value in _counters(self.before).items())

    def increase(
        self, name: str, label: str, combine: Callable[[Iterable[float]], float] = math.fsum, **labels: str
    ) -> dict[str, float]:
        """Return a counter's increase for each value of ``label``. ``combine`` reduces the ranks' increases to one."""
        before: Mapping[_Series, float] = {}
        if not self.restarted:
            before = {_series(name, sample): sample.value for sample in self.before.of(name, **labels)}
        grown: dict[str, list[float]] = defaultdict(list)
        for sample in self.after.of(name, **labels):
            grown[sample.labels.get(label, "")].append(sample.value - before.get(_series(name, sample), 0.0))
        return {key: combine(values) for key, values in sorted(grown.items())}

    def per_second(self, name: str, label: str) -> dict[str, float] | None:
        """Return rates summed over ranks for each value of ``label``, or None if the counter is not exported."""
        if self.seconds <= 0 or not self.after.has(name):
            return None
        return {key: value / self.seconds for key, value in self.increase(name, label).items()}

    def per_replica(self, name: str, replica: str, **labels: str) -> float | None:
        """Return the rate of a counter that all ranks of a replica count alike, such as tokens.

        The rate is the sum over replicas of the largest rank's rate. ``replica`` is the label that distinguishes
        replicas. None means that the counter is not exported with these labels.
        """
        if self.seconds <= 0 or not self.after.of(name, **labels):
            return None
        return math.fsum(self.increase(name, replica, max, **labels).values()) / self.seconds

    def spread(self, histogram: str) -> Spread | None:
        """Return mean and quantiles of the values observed between the readings, or None if there were none."""
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
    """Return the quantile for ``share``, interpolated within its bucket as in Prometheus.

    ``buckets`` maps upper bounds to cumulative counts. A quantile beyond the last finite bound is unknown, and that
    bound is returned. None means that nothing was counted.
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
