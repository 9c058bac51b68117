"""What a decode policy is: where a block lives, what is selected, who computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.metrics.readings import Readings


class DecodePolicy(ABC):
    """Computes the attention of one new token per row. Its K and V are in the cache already."""

    on_ratio: Callable[[int, float], None] | None = None  # called with every layer's CPU compute ratio

    def reset_rows(self, rows: list[int]) -> None:  # noqa: B027
        """These rows are other requests from now on, or the same with other tokens."""

    def begin_step(self, batch: DecodeBatch) -> None:  # noqa: B027 (most policies have nothing to prepare)
        """Called once before the layers of a decode step."""

    def ahead(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> None:  # noqa: B027
        """A layer will be decoded soon, with about this query. Its new K and V are not in the cache yet."""

    @abstractmethod
    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        """query ``[rows, query heads, head_dim]`` -> output ``[rows, query heads, value dim]``, query's dtype."""

    def readings(self) -> Readings:
        """What this policy counts, for metrics."""
        return Readings()
