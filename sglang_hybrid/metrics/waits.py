"""Measure how long decode steps wait for the worker, if the server process collects replies itself."""

from __future__ import annotations

from sglang_hybrid.metrics.distribution import Buckets, Distribution
from sglang_hybrid.metrics.table import WAIT_SECONDS


class StepWaits:
    """Counts one waiting time for each decode step that used the worker: the sum over the step's layers."""

    def __init__(self) -> None:
        self._buckets = Buckets(WAIT_SECONDS)
        self._step: int | None = None
        self._seconds = 0.0

    def add(self, step: int, seconds: float) -> None:
        """Add the seconds that one layer of ``step`` waited. A step is counted when another step waits."""
        if step != self._step:
            if self._step is not None:
                self._buckets.add(self._seconds)
            self._step, self._seconds = step, 0.0
        self._seconds += seconds

    @property
    def distribution(self) -> Distribution:
        return self._buckets.distribution
