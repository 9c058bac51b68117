"""How long decode steps wait for the worker, where the server collects replies itself."""

from __future__ import annotations

from sglang_hybrid.metrics.distribution import Buckets, Distribution
from sglang_hybrid.metrics.table import WAIT_SECONDS


class StepWaits:
    """One value for each decode step that asked the worker: the sum over its layers."""

    def __init__(self) -> None:
        self._buckets = Buckets(WAIT_SECONDS)
        self._step: int | None = None
        self._seconds = 0.0

    def add(self, step: int, seconds: float) -> None:
        """A layer of ``step`` waited so long. The step is counted when another one waits."""
        if step != self._step:
            if self._step is not None:
                self._buckets.add(self._seconds)
            self._step, self._seconds = step, 0.0
        self._seconds += seconds

    @property
    def distribution(self) -> Distribution:
        return self._buckets.distribution
