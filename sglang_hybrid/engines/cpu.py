"""What a host without a GPU gets: native kernels over the pool, in place, in the server's own threads.

A row within the budget attends to its whole context. A longer one attends to the blocks that its real query scores
best, chosen anew at every step. Nothing is predicted and nothing is posted to a worker: it would compute on the same
cores, later. The torch implementation (``backend.HybridAttention``) stays the specification.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.native.host import BlockSummaries, HostKernels, SelectionRules
from sglang_hybrid.native.structs import Geometry
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.base import LayerCache
from sglang_hybrid.policies.full import read_row

_EVERYTHING = 1 << 30  # blocks: no context is longer


class CpuEngine:
    def __init__(
        self,
        config: HybridConfig,
        pool_address: int,
        geometry: Geometry,
        summaries: Sequence[BlockSummaries],
        threads: int,
    ) -> None:
        """Raises NativeError for a shape that the kernels do not have."""
        budget = _EVERYTHING if config.policy == "full" else config.budget_tokens // config.block_tokens
        rules = SelectionRules(budget, config.sink_blocks, config.recent_blocks)
        self.kernels = HostKernels(pool_address, geometry, summaries, rules, threads)
        self._table = torch.empty(0)
        self._lengths: list[int] = []
        self._new_tokens: list[int] = []

    def begin_prefill(self, page_table: torch.Tensor, lengths: list[int], new_tokens: list[int]) -> None:
        """Rows bring ``new_tokens`` each, and have ``lengths`` with them; page_table ``[rows, blocks]``."""
        self._table, self._lengths, self._new_tokens = page_table, lengths, new_tokens
        self.kernels.begin(page_table, torch.tensor(lengths), torch.tensor(new_tokens))

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: LayerCache, scale: float
    ) -> torch.Tensor:
        """query ``[new tokens of all rows, query heads, dim]``, K and V likewise -> the query's shape.

        SGLang may pad a batch beyond its real tokens.
        """
        self.kernels.store(cache.layer, keys, values)
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        first = 0
        for row, (length, new) in enumerate(zip(self._lengths, self._new_tokens, strict=True)):
            last = first + new
            if new == length:  # nothing before these tokens: they are at hand
                key, value = (tensor[first:last].transpose(0, 1) for tensor in (keys, values))
            else:
                key, value = read_row(cache, self._table[row], length, query.device)
            out[first:last] = reference.attend_prefill(query[first:last], key, value, scale)
            first = last
        return out

    def begin_decode(self, page_table: torch.Tensor, lengths: torch.Tensor) -> None:
        """One new token for each row."""
        self.kernels.begin(page_table, lengths, torch.ones_like(lengths))

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """query ``[rows, query heads, head_dim]``, K and V of the new tokens -> the query's shape and dtype."""
        return self.kernels.decode(layer, query, keys, values, scale).to(query.dtype)
