"""What it means to serve misses: post a layer's block lists, go on, collect partial attention."""

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
    """One layer on its way."""

    def collect(self) -> Partial:
        """What ``reference.attend_blocks`` gives for the posted lists. Called once."""


class PendingSum(Protocol):
    """One layer's sum of values on its way."""

    def collect(self) -> torch.Tensor:
        """What ``reference_weights.sum_values`` gives. Called once."""


class MissServer(ABC):
    @functools.cached_property
    def served(self) -> ServedBlocks:
        """Blocks that were attended, for metrics."""
        return ServedBlocks()

    @abstractmethod
    def post(
        self, query: torch.Tensor, cache: LayerCache, blocks: BlockList, scale: float, step: int
    ) -> PendingAttention:
        """Begin with one layer. Every list's blocks come first, then ``NO_BLOCK``; only the last may be partial.

        Nothing that was passed may change before the result is collected.
        """

    def post_sum(self, weights: torch.Tensor, cache: LayerCache, ids: torch.Tensor, step: int) -> PendingSum:
        """Begin with one layer's sum of values by ``weights`` ``[rows, KV heads, group, n, block tokens]``.

        ids ``[rows, KV heads, n]``, every list's blocks first, then ``NO_BLOCK``. Here: in plain torch, at once.
        """
        return ReadySum(reference_weights.sum_values(weights, cache.values, ids))

    def wake(self) -> None:  # noqa: B027 (most servers never sleep)
        """A decode step with misses begins: be awake."""

    @property
    def waits(self) -> Distribution | None:
        """Seconds that decode steps waited for a worker. None: there is none."""
        return None

    def describe_worker(self) -> dict[str, Any] | None:
        """The worker, for people. None: there is none."""
        return None


class Ready:
    """A result that was there at once."""

    def __init__(self, partial: Partial) -> None:
        self._partial = partial

    def collect(self) -> Partial:
        return self._partial


class ReadySum:
    """A sum that was there at once."""

    def __init__(self, out: torch.Tensor) -> None:
        self._out = out

    def collect(self) -> torch.Tensor:
        return self._out
