"""How fast misses are gathered while the GPU decodes, which decides how many of them are gathered."""

from __future__ import annotations

_WEIGHT = 0.5  # of a new measurement: the rate follows traffic within some looks, and single pauses do not change much
_FORGET = 1.25  # factor of the rate for each look at which nothing was gathered, so that gathers are tried again


class GatherRate:
    """Rate of gathers in bytes per second: an estimate, until gathers were measured.

    A gather beside attention, recalls and a worker that reads host memory takes several times as long as alone, and the
    GPU waits for what takes longer than it was expected to.
    """

    def __init__(self, estimate: float) -> None:
        self._estimate = self.rate = estimate
        self.is_measured = False  # then the rate is one beside recalls

    def observe(self, copied: float, seconds: float) -> None:
        """Take note of ``copied`` bytes, whose gathers took ``seconds`` in all."""
        if copied > 0 and seconds > 0:
            rate = copied / seconds
            self.rate = rate if not self.is_measured else _WEIGHT * rate + (1 - _WEIGHT) * self.rate
            self.is_measured = True
        else:
            self.rate = min(self._estimate, self.rate * _FORGET)
