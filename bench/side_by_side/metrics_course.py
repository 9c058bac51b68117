"""Samples a server's metrics while answers are decoded, and summarizes them by part of that time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from bench.side_by_side.metrics import counts

Metrics = dict[str, float]


class MetricsCourse:
    """Reads metrics about every ``interval`` seconds in a thread. Use as a context manager around the load."""

    def __init__(self, read: Callable[[], Metrics], interval: float = 0.5) -> None:
        self._read, self._interval = read, interval
        self._samples: list[tuple[float, Metrics]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            self._samples.append((time.monotonic(), self._read()))
            self._ended.wait(self._interval)

    def parts(self, begin: float, end: float, count: int) -> list[Metrics]:
        """Return means of gauges and rises of counters per second, for each of ``count`` equal parts of the time."""
        edges = [begin + (end - begin) * n / count for n in range(count + 1)]
        return [part_of(self._samples, first, last) for first, last in itertools.pairwise(edges)]


def part_of(samples: list[tuple[float, Metrics]], begin: float, end: float) -> Metrics:
    """Return means of gauges and rates of counters over samples from ``begin`` to ``end``, without buckets."""
    inside = [(when, seen) for when, seen in samples if begin <= when <= end and seen]
    if not inside:
        return {}
    (first_time, first), (last_time, last) = inside[0], inside[-1]
    found = {}
    for name in last:
        if "_bucket" in name or "_created" in name:
            continue
        if not counts(name):
            values = [seen[name] for _, seen in inside if name in seen]
            found[name] = round(sum(values) / len(values), 6)
        elif last_time > first_time:
            found[name] = round((last[name] - first.get(name, 0.0)) / (last_time - first_time), 3)
    return found
