"""Recent CPU compute ratio (misses over budget) of each layer."""

from __future__ import annotations

_WEIGHT = 0.1  # of a new value: the mean covers about the last ten values


class RecentMean:
    """An exponential moving average; None before the first value."""

    def __init__(self, weight: float = _WEIGHT) -> None:
        self._weight = weight
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + self._weight * (value - self.value)


class LayerRatios:
    """Recent ratio of each layer. Engines call ``ratio`` with that of one step, or of the steps since the last call."""

    def __init__(self) -> None:
        self._means: dict[int, RecentMean] = {}
        self._are_new = False

    def ratio(self, layer: int, ratio: float) -> None:
        self._means.setdefault(layer, RecentMean()).add(ratio)
        self._are_new = True

    def take_new(self) -> dict[int, float]:
        """Return the recent means by layer; an empty dictionary if no ratio came since the last call."""
        if not self._are_new:
            return {}
        self._are_new = False
        return {layer: mean.value for layer, mean in self._means.items() if mean.value is not None}
