"""When each layer refreshes its resident blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# The controller leaves a layer alone while its mean ratio is in this part of beta, and looks every so many steps.
_BAND = (0.5, 1.0)
_SHORTER, _LONGER = 0.7, 1.3
_LOOK_STEPS = 32


class RecallSchedule:
    """Per-layer intervals in decode steps, and the controller that adapts them to live traffic.

    Steps are counted per row from its first one, so what a request gets does not depend on which others run beside it.
    The CPU compute ratio of a layer is misses over budget. It is lowest right after a recall and grows until the next,
    so what is held against beta is its mean over some intervals. An interval of 0 means never.

    Intervals get shorter, and then longer again up to what they were: a host that computes many misses in time could do
    with hardly any recalls, but a recall is also when the real query says what it wants.
    """

    def __init__(self, intervals: Sequence[int], beta: float, adapt: bool, early: int = 0) -> None:
        """``early``: first steps of a row in which all layers recall that do so at all."""
        self._early = early
        self.intervals, self._longest = list(intervals), tuple(intervals)
        self.adapts = adapt and any(self.intervals)
        self.beta = beta  # may change while rows decode
        self._sums = [0.0] * len(self.intervals)
        self._counts = [0] * len(self.intervals)

    def due(self, layer: int, steps: torch.Tensor) -> torch.Tensor:
        """Which rows recall: ``steps`` ``[rows]`` that each has decoded, this one included -> ``[rows]`` of bool.

        Layers begin at different steps, so that their copies do not come all at once.
        """
        interval = self.intervals[layer]
        if interval == 0:
            return torch.zeros_like(steps, dtype=torch.bool)
        return ((steps + layer) % interval == 0) | (steps <= self._early)

    def observe(self, layer: int, ratio: float, steps: int = 1) -> None:
        """The CPU compute ratio of this step, or its mean over so many."""
        interval = self.intervals[layer]
        if not self.adapts or interval == 0:
            return
        self._sums[layer] += ratio * steps
        self._counts[layer] += steps
        if self._counts[layer] < max(_LOOK_STEPS, 2 * interval):
            return
        mean = self._sums[layer] / self._counts[layer]
        self._sums[layer], self._counts[layer] = 0.0, 0
        low, high = (part * self.beta for part in _BAND)
        if mean > high:
            self.intervals[layer] = max(1, int(interval * _SHORTER))
        elif mean < low:
            self.intervals[layer] = min(self._longest[layer], max(interval + 1, int(interval * _LONGER)))
