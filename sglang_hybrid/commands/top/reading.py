"""A parsed answer of /metrics, with sums and means over its ranks and replicas."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sglang_hybrid.commands.top import names

MAX_LAYERS = 1024  # larger layer labels are ignored, because lists have one entry per layer


@dataclass(frozen=True)
class Sample:
    labels: Mapping[str, str]
    value: float  # finite


@dataclass(frozen=True)
class Reading:
    """Samples by name. ``at``: seconds of a monotonic clock; ``time``: Unix time, to show."""

    at: float
    time: float
    samples: Mapping[str, tuple[Sample, ...]]

    def has(self, name: str) -> bool:
        return name in self.samples or f"{name}_count" in self.samples

    @property
    def is_hybrid(self) -> bool:
        return any(name.startswith(names.HYBRID) for name in self.samples)

    @property
    def is_sglang(self) -> bool:
        return any(name.startswith("sglang") for name in self.samples)

    def of(self, name: str, **labels: str) -> tuple[Sample, ...]:
        """Return the samples of ``name`` with ``labels``, except samples per priority: a total is exported too."""
        wanted = labels.items()
        return tuple(
            sample
            for sample in self.samples.get(name, ())
            if wanted <= sample.labels.items() and not sample.labels.get("priority")
        )

    def total(self, name: str) -> float | None:
        """Return the sum over all ranks, for quantities that each rank has for itself, such as memory."""
        return _reduced(math.fsum, (sample.value for sample in self.of(name)))

    def mean(self, name: str) -> float | None:
        return _reduced(_mean, (sample.value for sample in self.of(name)))

    def per_replica(self, name: str, replica: str) -> float | None:
        """Return the sum over replicas of the largest rank's value.

        This suits quantities that all ranks of a replica count alike, such as requests. ``replica`` is the label that
        distinguishes replicas.
        """
        largest: dict[str, float] = {}
        for sample in self.of(name):
            key = sample.labels.get(replica, "")
            largest[key] = max(sample.value, largest.get(key, -math.inf))
        return _reduced(math.fsum, largest.values())

    def by(self, name: str, label: str) -> dict[str, float] | None:
        """Return sums over ranks for each value of ``label``, or None if the metric is not exported."""
        if name not in self.samples:
            return None
        grouped = self._grouped(name, label)
        return {key: math.fsum(values) for key, values in sorted(grouped.items())}

    def layers(self, name: str) -> tuple[float | None, ...]:
        """Return means over ranks for each layer from 0 on, with None for a layer that no rank reports."""
        grouped = {
            int(layer): _mean(values)
            for layer, values in self._grouped(name, "layer").items()
            if layer.isdecimal() and int(layer) < MAX_LAYERS
        }
        return tuple(grouped.get(layer) for layer in range(max(grouped, default=-1) + 1))

    def _grouped(self, name: str, label: str) -> dict[str, list[float]]:
        grouped: dict[str, list[float]] = defaultdict(list)
        for sample in self.of(name):
            grouped[sample.labels.get(label, "")].append(sample.value)
        return grouped


def parse(text: str, at: float, time: float) -> Reading:
    """Parse Prometheus' text format. Raise ValueError for anything else.

    Infinite values and NaN are dropped: they cannot be drawn, and JSON does not have them.
    """
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[Sample]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for found in family.samples:
            if math.isfinite(found.value):
                samples[found.name].append(Sample(found.labels, float(found.value)))
    return Reading(at, time, {name: tuple(found) for name, found in samples.items()})


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def _reduced(function: Callable[[Iterable[float]], float], values: Iterable[float]) -> float | None:
    listed = list(values)
    return function(listed) if listed else None
