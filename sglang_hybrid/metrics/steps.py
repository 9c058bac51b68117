"""Measure decode steps by the scheduler's clock.

A step lasts until the next batch begins. A GPU is about one step behind the scheduler, so single values are inexact.
But the scheduler waits for the results of the previous step and cannot run ahead, so means are right, and measuring
does not wait for the GPU.
"""

from __future__ import annotations

from sglang_hybrid.metrics.distribution import Buckets, Distribution
from sglang_hybrid.metrics.table import STEP_SECONDS


class StepClock:
    def __init__(self) -> None:
        self._buckets = Buckets(STEP_SECONDS)
        self._began: float | None = None  # start of the step that runs now
        self.rows: int | None = None  # of the last step, 0 when idle; None before the first

    def batch_begins(self, decoded_rows: int | None, now: float) -> None:
        """End the running step, and start one of ``decoded_rows`` rows; None: the batch is no decode step."""
        self._end_step(now)
        if decoded_rows is not None:
            self._began, self.rows = now, decoded_rows

    def rests(self, now: float) -> None:
        """End the running step: no batch runs any more."""
        self._end_step(now)
        if self.rows is not None:
            self.rows = 0

    def _end_step(self, now: float) -> None:
        if self._began is not None:
            self._buckets.add(now - self._began)
            self._began = None

    @property
    def seconds(self) -> Distribution:
        return self._buckets.distribution
