"""Hybrid attention over a paged host pool, as SGLang's adapter calls it: one prefill, one decode.

Knows tensors, pages and rows; ``integration.attention_backend`` translates SGLang's batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.memory.prompt_queries import PromptQueries
from sglang_hybrid.misses.base import MissServer
from sglang_hybrid.ops import reference
from sglang_hybrid.policies import create_policy
from sglang_hybrid.policies.base import DecodeBatch, LayerCache
from sglang_hybrid.policies.full import read_row
from sglang_hybrid.scout.tuning import Tuning


@dataclass(frozen=True)
class PrefillBatch:
    """One prefill step: each row brings its next tokens, on top of what is in the cache."""

    page_table: torch.Tensor  # [rows, blocks of the longest row], page of each block
    rows: torch.Tensor  # [rows], SGLang's number of each row
    lengths: list[int]  # tokens of each row, the new ones included
    new_tokens: list[int]  # of which new


class HybridAttention:
    """Exact attention in prefill, the configured policy in decode."""

    def __init__(self, config: HybridConfig, rows: int, layers: int, misses: MissServer | None = None) -> None:
        """For at most ``rows`` requests at a time and ``layers`` layers."""
        self._rows = rows
        self._layers = layers
        self._misses = misses
        self._prompts = PromptQueries(rows)
        self.use(config)

    def use(self, config: HybridConfig, tuning: Tuning | None = None) -> None:
        """Decode by these settings from now on. Rows that are decoding begin anew."""
        self.config = config
        self.policy = create_policy(config, self._rows, self._layers, self._misses, self._prompts, tuning)
        self.policy.rows_begin(list(range(self._rows)))

    def rows_begin(self, rows: list[int]) -> None:
        """These rows are other requests from now on, or go back to the end of their prompts."""
        self.policy.rows_begin(rows)

    def prefill(self, query: torch.Tensor, cache: LayerCache, batch: PrefillBatch, scale: float) -> torch.Tensor:
        """query ``[new tokens of all rows, query heads, head_dim]`` -> the same, with the value's dim.

        K and V of the new tokens are in the cache already. One layer of one row at a time is
        read from the host, so that device memory holds one context of one layer and no more.
        """
        out = query.new_empty(query.shape[0], query.shape[1], cache.values.shape[3])
        last_tokens = torch.tensor(batch.new_tokens, device=query.device).cumsum(0) - 1
        self._prompts.store(cache.layer, batch.rows, query[last_tokens])
        first = 0
        for row, (length, new) in enumerate(zip(batch.lengths, batch.new_tokens, strict=True)):
            last = first + new
            key, value = read_row(cache, batch.page_table[row], length, query.device)
            out[first:last] = reference.attend_prefill(query[first:last], key, value, scale)
            first = last
        return out

    def begin_decode(self, batch: DecodeBatch) -> None:
        """Before the layers of a decode step."""
        self.policy.begin_step(batch)

    def ahead(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> None:
        """While the layer before is running, with a predicted query."""
        self.policy.ahead(query, cache, batch, scale)

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        """query ``[rows, query heads, head_dim]`` -> ``[rows, query heads, value dim]``."""
        return self.policy.decode(query, cache, batch, scale)
