"""Recent CPU compute ratio of each layer."""

from __future__ import annotations

_WEIGHT = 0.1  # of a new value: about the last ten


class RecentMean:
    """A mean that forgets."""

    def __init__(self, weight: float = _WEIGHT) -> None:
        self._weight = weight
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + self._weight * (value - self.value)


class LayerRatios:
    """Engines call ``ratio`` with misses over budget of a layer: of every step, or of the steps since the last call."""

    def __init__(self) -> None:
        self._means: dict[int, RecentMean] = {}
        self._are_new = False

    def ratio(self, layer: int, ratio: float) -> None:
        self._means.setdefault(layer, RecentMean()).add(ratio)
        self._are_new = True

    def take_new(self) -> dict[int, float]:
        """Recent means of all layers; nothing if no ratio came since the last call."""
        if not self._are_new:
            return {}
        self._are_new = False
        return {layer: mean.value for layer, mean in self._means.items() if mean.value is not None}
