"""Interface of miss servers: post a layer's block lists, continue with other work, collect partial attention."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch

from sglang_hybrid.core import BlockList, LayerCache, Partial
from sglang_hybrid.metrics.distribution import Distribution
from sglang_hybrid.metrics.readings import ServedBlocks
from sglang_hybrid.ops import reference_weights


class PendingAttention(Protocol):
    """One posted layer whose partial attention is being computed."""

    def collect(self) -> Partial:
        """Wait for and return what ``reference.attend_blocks`` returns for the posted lists. Call once."""


class PendingSum(Protocol):
    """One posted layer whose sum of values is being computed."""

    def collect(self) -> torch.Tensor:
        """Wait for and return what ``reference_weights.sum_values`` returns for the posted lists. Call once."""


class MissServer(ABC):
    @functools.cached_property
    def served(self) -> ServedBlocks:
        """Return the counters of blocks that were attended to, for metrics."""
        return ServedBlocks()

    @abstractmethod
    def post(
        self, query: torch.Tensor, cache: LayerCache, blocks: BlockList, scale: float, step: int
    ) -> PendingAttention:
        """Start one layer. Each list has its blocks first, then ``NO_BLOCK``; only the last block may be partial.

        The caller must not change any argument before it has collected the result. A worker holds the newest two posts:
        an older one that is collected after them is computed in this process.
        """

    def post_sum(self, weights: torch.Tensor, cache: LayerCache, ids: torch.Tensor, step: int) -> PendingSum:
        """Start one layer's sum of values by ``weights`` ``[rows, KV heads, group, n, block tokens]``.

        ids ``[rows, KV heads, n]``: each list has its blocks first, then ``NO_BLOCK``. This default computes the sum in
        plain torch, at once.
        """
        return ReadySum(reference_weights.sum_values(weights, cache.values, ids))

    def wake(self) -> None:  # noqa: B027 (most servers never sleep)
        """Wake the server, because a decode step with misses begins."""

    @property
    def waits(self) -> Distribution | None:
        """Return the seconds that decode steps waited for a worker, or None without a worker."""
        return None

    def describe_worker(self) -> dict[str, Any] | None:
        """Return a description of the worker for display, or None without a worker."""
        return None


class Ready:
    """Partial attention that was computed at once."""

    def __init__(self, partial: Partial) -> None:
        self._partial = partial

    def collect(self) -> Partial:
        return self._partial


class ReadySum:
    """Sum of values that was computed at once."""

    def __init__(self, out: torch.Tensor) -> None:
        self._out = out

    def collect(self) -> torch.Tensor:
        return self._out
