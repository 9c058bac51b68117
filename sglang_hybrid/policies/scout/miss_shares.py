"""How little attention a block may get and still be a miss: as little as the host has time for."""

from __future__ import annotations

from collections.abc import Sequence

# Of a KV head's attention: below, a block hardly changes an answer; above, too much would be left out. Guesses, as the
# numbers below are.
LOWEST, HIGHEST = 0.0002, 0.05
FIRST = 0.001  # until the first steps were counted
_BAND = (0.75, 1.0)  # of the target: a layer in it is left alone
_MOST_CHANGE = 1.5  # at a time: what is missed follows with a delay


class MissShares:
    """One share per layer, which follows live traffic.

    The lower it is, the more blocks are attended. A layer that misses less than the host computes in time gets a lower
    share, one that misses more a higher one. So the time that there is goes where attention is spread.
    """

    def __init__(self, shares: Sequence[float], adapt: bool) -> None:
        self.shares, self.adapts = list(shares), adapt

    def observe(self, layer: int, ratio: float, target: float) -> None:
        """``ratio``: what the layer missed, as a part of the budget."""
        low, high = (part * target for part in _BAND)
        if not self.adapts or low <= ratio <= high:
            return
        aim = (low + high) / 2
        change = min(_MOST_CHANGE, max(1 / _MOST_CHANGE, ratio / aim))
        self.shares[layer] = min(HIGHEST, max(LOWEST, self.shares[layer] * change))

    def leaves_to_recalls(self, layer: int) -> bool:
        """Whether only more recalls can make the layer miss less."""
        return not self.adapts or self.shares[layer] >= HIGHEST
