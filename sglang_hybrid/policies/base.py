"""What a decode policy is: where a block lives, what is selected, who computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of the KV cache: host pool and digests."""

    keys: torch.Tensor  # [pages, KV heads, block tokens, head_dim], host memory
    values: torch.Tensor  # likewise
    digests: torch.Tensor  # [pages, KV heads, kinds, head_dim], on the model's device
    layer: int = 0  # of this rank's pool

    @property
    def block_tokens(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True)
class DecodeBatch:
    """One decode step, the same for all its layers. Tensors are on the model's device."""

    page_table: torch.Tensor  # [rows, blocks of the longest row], page of each block
    lengths: torch.Tensor  # [rows], tokens of each row, the new one included
    lengths_on_host: list[int]
    step: int = 0  # counts decode steps: which one a partial result belongs to

    def block_counts(self, block_tokens: int) -> torch.Tensor:
        """Blocks of each row, the last one being the tail."""
        return -(-self.lengths // block_tokens)


@dataclass(frozen=True)
class BlockList:
    """Blocks to attend, per (row, KV head)."""

    ids: torch.Tensor  # [rows, KV heads, n] pages, reference.NO_BLOCK where the list is shorter
    fill: torch.Tensor  # [rows, KV heads, n] tokens in each


class DecodePolicy(ABC):
    """Computes the attention of one new token per row. Its K and V are in the cache already."""

    def begin_step(self, batch: DecodeBatch) -> None:  # noqa: B027 (most policies have nothing to prepare)
        """Called once before the layers of a decode step."""

    @abstractmethod
    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        """query ``[rows, query heads, head_dim]`` -> output ``[rows, query heads, value dim]``, query's dtype."""
