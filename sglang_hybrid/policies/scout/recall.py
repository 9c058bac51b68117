"""The schedule of recalls: when each layer refreshes its resident blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# The controller keeps a layer's interval while its mean ratio is within these parts of beta, and checks now and then.
_BAND = (0.5, 1.0)
_SHORTER, _LONGER = 0.7, 1.3
_LOOK_STEPS = 32


class RecallSchedule:
    """Recall intervals of each layer in decode steps, and the controller that adapts them to live traffic.

    Steps are counted per row from the row's first one, so the schedule of a request does not depend on when other
    requests started. An interval of 0 means never. The CPU compute ratio of a layer is misses over budget. It is lowest
    right after a recall and grows until the next one, so its mean over some intervals is compared with beta.

    The controller shortens intervals, and lengthens them again at most to their initial values: a host that computes
    many misses in time needs hardly any recalls, but in a recall the real query also chooses the resident blocks.
    """

    def __init__(self, intervals: Sequence[int], beta: float, adapt: bool, early: int = 0) -> None:
        """``early``: number of first steps of a row in which all layers recall, unless their interval is 0."""
        self._early = early
        self.intervals, self._longest = list(intervals), tuple(intervals)
        self.adapts = adapt and any(self.intervals)
        self.beta = beta  # may change while rows decode
        self._sums = [0.0] * len(self.intervals)
        self._counts = [0] * len(self.intervals)

    def due(self, layer: int, steps: torch.Tensor) -> torch.Tensor:
        """Return which rows recall, ``[rows]`` of bool. ``steps`` ``[rows]``: decode steps of each, this one included.

        Layers recall at different steps, so that their copies do not come all at once.
        """
        interval = self.intervals[layer]
        if interval == 0:
            return torch.zeros_like(steps, dtype=torch.bool)
        return ((steps + layer) % interval == 0) | (steps <= self._early)

    def observe(self, layer: int, ratio: float, steps: int = 1) -> None:
        """Record the layer's CPU compute ratio, the mean of ``steps`` steps, and adapt the interval if it is time."""
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
