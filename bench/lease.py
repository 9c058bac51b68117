"""Time that a run may take: a GPU is lent for so many seconds, and what was not begun in time is left out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Lease:
    """Begins when it is made. Without ``seconds`` it never ends."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds

    def left(self) -> float:
        return max(0.0, self._end - self._clock())

    def allows(self, seconds: float) -> bool:
        """Whether something that takes so long would end in time."""
        return self.left() >= seconds

    def at_most(self, seconds: float) -> float:
        """``seconds``, or what is left if that is less."""
        return min(seconds, self.left())
