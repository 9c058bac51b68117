"""Policy ``scout``: every (row, KV head) attends to its best blocks, as many as the budget holds.

Tail, recent and sink blocks are always attended; the rest of the budget goes to the blocks
with the best digest scores. The two parts are computed apart and merged, as they will be
computed by different processors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.base import DecodeBatch, DecodePolicy, LayerCache


@dataclass(frozen=True)
class BlockList:
    """Blocks to attend, per (row, KV head)."""

    ids: torch.Tensor  # [rows, KV heads, n] pages, reference.NO_BLOCK where the list is shorter
    fill: torch.Tensor  # [rows, KV heads, n] tokens in each


class ScoutPolicy(DecodePolicy):
    def __init__(self, config: HybridConfig) -> None:
        self._budget_blocks = config.budget_tokens // config.block_tokens
        self._sink = config.sink_blocks
        self._recent = config.recent_blocks
        self._spread = config.digest_spread

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        always, misses = self.select(query, cache, batch, scale)
        local = reference.attend_blocks(query, cache.keys, cache.values, always.ids, always.fill, scale)
        remote = reference.attend_blocks(query, cache.keys, cache.values, misses.ids, misses.fill, scale)
        out, _ = reference.merge(*local, *remote)
        return out.to(query.dtype)

    def select(
        self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float
    ) -> tuple[BlockList, BlockList]:
        """The blocks that are always in, and the ones that earned it by score."""
        counts = batch.block_counts(cache.block_tokens)
        logits = reference.digest_logits(query, cache.digests[batch.page_table], self._spread)
        scores = reference.block_scores(logits, counts, scale)
        chosen = reference.select_blocks(scores, counts, self._budget_blocks, self._sink, self._recent)
        forced = reference.is_forced(chosen, counts, self._sink, self._recent)
        always, misses = (
            BlockList(
                reference.block_ids(positions, batch.page_table),
                reference.block_fill(positions, batch.lengths, cache.block_tokens),
            )
            for positions in map(_compact, reference.split(chosen, forced))
        )
        return always, misses


def _compact(positions: torch.Tensor) -> torch.Tensor:
    """Shift each list's blocks to the front, in order, and cut off what is empty in all of them."""
    present = positions != reference.NO_BLOCK
    order = (~present).to(torch.uint8).argsort(dim=2, stable=True)
    longest = int(present.sum(dim=2).max()) if positions.numel() else 0
    return positions.gather(2, order)[..., :longest]
