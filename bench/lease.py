"""Time limit of a benchmark run: a GPU is leased for some seconds, and work that would not end in time is left out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Lease:
    """Countdown from ``seconds``, started when the object is created. With None the lease never ends."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds

    def left(self) -> float:
        return max(0.0, self._end - self._clock())

    def allows(self, seconds: float) -> bool:
        """Return True if work that takes ``seconds`` would end before the lease does."""
        return self.left() >= seconds

    def at_most(self, seconds: float) -> float:
        """Return ``seconds``, or the seconds that are left if they are fewer."""
        return min(seconds, self.left())
