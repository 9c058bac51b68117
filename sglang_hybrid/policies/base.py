"""Interface of decode policies, which decide where a block is kept, what is selected, and who computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.metrics.readings import Readings


class DecodePolicy(ABC):
    """Computes the attention of one new token per row. The token's K and V are in the cache already."""

    on_ratio: Callable[[int, float], None] | None = None  # called with every layer's CPU compute ratio

    def reset_rows(self, rows: list[int]) -> None:  # noqa: B027
        """Forget all state of ``rows``: a new request took the row, or the tokens of its request have changed."""

    def begin_step(self, batch: DecodeBatch) -> None:  # noqa: B027 (most policies have nothing to prepare)
        """Prepare for a decode step. Called once before the step's layers."""

    def ahead(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> None:  # noqa: B027
        """Prepare a layer that is decoded soon, with about this query. Its new K and V are not in the cache yet."""

    @abstractmethod
    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        """Attend: query ``[rows, query heads, head_dim]`` -> ``[rows, query heads, value dim]``, in query's dtype."""

    def readings(self) -> Readings:
        """Return what this policy counts, for metrics."""
        return Readings()
