"""Policy ``scout``: every (row, KV head) attends to its best blocks, as many as the budget holds.

Tail, recent and sink blocks are always attended; the rest of the budget goes to the blocks
with the best digest scores: the misses, which are served by the CPU worker while this process
attends to what is always in. The two parts are merged.
"""

from __future__ import annotations

import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.misses.base import MissServer
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.base import BlockList, DecodeBatch, DecodePolicy, LayerCache


class ScoutPolicy(DecodePolicy):
    def __init__(self, config: HybridConfig, misses: MissServer) -> None:
        self._misses = misses
        self._budget_blocks = config.budget_tokens // config.block_tokens
        self._block_tokens = config.block_tokens
        self._sink = config.sink_blocks
        self._recent = config.recent_blocks
        self._spread = config.digest_spread

    def begin_step(self, batch: DecodeBatch) -> None:
        always = self._sink + self._recent + 1
        if max(batch.lengths_on_host, default=0) > always * self._block_tokens:
            self._misses.work_is_near()

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        always, misses = self.select(query, cache, batch, scale)
        posted = self._misses.post(query, cache, misses, scale, batch.step)
        local = reference.attend_blocks(query, cache.keys, cache.values, always.ids, always.fill, scale)
        out, _ = reference.merge(*local, *posted.collect())
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
