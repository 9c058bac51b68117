"""Hybrid attention over a paged host pool, as SGLang's adapter calls it: one prefill, one decode.

Knows tensors, pages and rows; ``integration.attention_backend`` translates SGLang's batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.misses.base import MissServer
from sglang_hybrid.ops import reference
from sglang_hybrid.policies import create_policy
from sglang_hybrid.policies.base import DecodeBatch, LayerCache
from sglang_hybrid.policies.full import read_row


@dataclass(frozen=True)
class PrefillBatch:
    """One prefill step: each row brings its next tokens, on top of what is in the cache."""

    page_table: torch.Tensor  # [rows, blocks of the longest row], page of each block
    lengths: list[int]  # tokens of each row, the new ones included
    new_tokens: list[int]  # of which new


class HybridAttention:
    """Exact attention in prefill, the configured policy in decode."""

    def __init__(self, config: HybridConfig, misses: MissServer | None = None) -> None:
        self.config = config
        self._policy = create_policy(config, misses)

    def prefill(self, query: torch.Tensor, cache: LayerCache, batch: PrefillBatch, scale: float) -> torch.Tensor:
        """query ``[new tokens of all rows, query heads, head_dim]`` -> the same, with the value's dim.

        K and V of the new tokens are in the cache already. One layer of one row at a time is
        read from the host, so that device memory holds one context of one layer and no more.
        """
        out = query.new_empty(query.shape[0], query.shape[1], cache.values.shape[3])
        first = 0
        for row, (length, new) in enumerate(zip(batch.lengths, batch.new_tokens, strict=True)):
            last = first + new
            key, value = read_row(cache, batch.page_table[row], length, query.device)
            out[first:last] = reference.attend_prefill(query[first:last], key, value, scale)
            first = last
        return out

    def begin_decode(self, batch: DecodeBatch) -> None:
        """Before the layers of a decode step."""
        self._policy.begin_step(batch)

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        """query ``[rows, query heads, head_dim]`` -> ``[rows, query heads, value dim]``."""
        return self._policy.decode(query, cache, batch, scale)
