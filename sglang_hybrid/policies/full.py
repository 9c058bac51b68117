"""Policy ``full``: every row attends to its whole context. All other policies are compared with it."""

from __future__ import annotations

import torch

from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.base import DecodePolicy


class FullPolicy(DecodePolicy):
    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        rows = []
        for row, length in enumerate(batch.lengths_on_host):
            key, value = read_row(cache, batch.page_table[row], length, query.device)
            rows.append(reference.attend_prefill(query[row : row + 1], key, value, scale))
        return torch.cat(rows)


def read_row(
    cache: LayerCache, pages: torch.Tensor, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of the first ``length`` tokens of a row, ``[KV heads, length, dim]`` on ``device``."""
    count = -(-length // cache.block_tokens)
    blocks = pages[:count].expand(1, cache.keys.shape[1], -1)
    key, value = (
        reference.gather_blocks(pool, blocks, device).squeeze(0).flatten(1, 2)[:, :length]
        for pool in (cache.keys, cache.values)
    )
    return key, value
