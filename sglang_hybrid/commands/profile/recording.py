"""Decodes exactly, and records the scores and shares of attention that policy ``scout`` depends on.

One exact decode is enough: what any bonus and any interval would have selected follows from the scores of the blocks,
and what they would have missed follows from the blocks' true shares of attention (``simulation``).
"""

from __future__ import annotations

import torch

from sglang_hybrid.commands.profile.records import BlockParts, LayerRecord
from sglang_hybrid.commands.profile.row_copies import RowCopies
from sglang_hybrid.commands.profile.share_costs import ShareCosts
from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.full import FullPolicy


class RecordingPolicy(FullPolicy):
    """Full attention that records scores: by the predicted query after a call of ``ahead``, else by the real query."""

    def __init__(self, costs: ShareCosts | None = None) -> None:
        """``costs``: gets the contribution of every block to attention at every step."""
        self._costs = costs
        self._scores: dict[int, list[torch.Tensor]] = {}
        self._real_scores: dict[int, list[torch.Tensor]] = {}
        self._shares: dict[int, list[torch.Tensor]] = {}
        self._counts: dict[int, list[torch.Tensor]] = {}
        self._ahead: dict[int, torch.Tensor] = {}
        self._rows = RowCopies()

    def ahead(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> None:
        # Scored now, as policy scout does: the new token is not in the tail's digest yet.
        self._ahead[cache.layer] = self._score(query, cache, batch, scale)

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        layer, counts = cache.layer, batch.block_counts(cache.block_tokens)
        real_scores = self._score(query, cache, batch, scale)
        self._scores.setdefault(layer, []).append(self._ahead.pop(layer, real_scores))
        self._real_scores.setdefault(layer, []).append(real_scores)
        self._counts.setdefault(layer, []).append(counts.to(query.device))
        rows, shares, outputs = [], [], []
        for row, length in enumerate(batch.lengths_on_host):
            key, value = self._rows.read(cache, row, batch.page_table[row], length, query.device)
            rows.append(reference.attend_prefill(query[row : row + 1], key, value, scale))
            weights = _block_weights(query[row], key, scale, cache.block_tokens, batch.page_table.shape[1])
            shares.append(weights.sum(dim=3))
            if self._costs:
                outputs.append(_block_outputs(weights, value))
        grouped = torch.stack(shares)
        self._shares.setdefault(layer, []).append(grouped.mean(dim=2))
        if self._costs:
            parts = BlockParts(grouped, torch.stack(outputs))
            self._costs.add(layer, self._scores[layer][-1], real_scores, self._counts[layer][-1], parts)
        return torch.cat(rows)

    def _score(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        counts = batch.block_counts(cache.block_tokens)
        logits = reference.without_tail(
            cache.estimates(query, batch.page_table, reference.DIGEST_SPREAD, scale), counts
        )
        return reference.block_scores(logits, counts, scale)

    def record(self, layer: int) -> LayerRecord:
        blocks = self._scores[layer][-1].shape[2]
        return LayerRecord(
            torch.stack([_padded(step, blocks, -torch.inf) for step in self._scores[layer]]),
            torch.stack([_padded(step, blocks, -torch.inf) for step in self._real_scores[layer]]),
            torch.stack([_padded(step, blocks, 0.0) for step in self._shares[layer]]),
            torch.stack(self._counts[layer]),
        )


def _block_weights(
    query: torch.Tensor, key: torch.Tensor, scale: float, block_tokens: int, blocks: int
) -> torch.Tensor:
    """query ``[query heads, D]``, key ``[KV heads, tokens, D]`` -> attention ``[KV heads, group, blocks, T]``."""
    grouped = query.float().view(key.shape[0], -1, query.shape[-1])
    weights = torch.softmax(grouped @ key.float().transpose(1, 2) * scale, dim=-1)
    padded = torch.nn.functional.pad(weights, (0, blocks * block_tokens - weights.shape[2]))
    return padded.view(*weights.shape[:2], blocks, block_tokens)


def _block_outputs(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """weights of ``_block_weights``, value ``[KV heads, tokens, Dv]`` -> ``[KV heads, group, blocks, Dv]``."""
    blocks, block_tokens = weights.shape[2:]
    padded = torch.nn.functional.pad(value.float(), (0, 0, 0, blocks * block_tokens - value.shape[1]))
    return (weights.transpose(1, 2) @ padded.view(value.shape[0], blocks, block_tokens, -1)).transpose(1, 2)


def _padded(step: torch.Tensor, blocks: int, value: float) -> torch.Tensor:
    return torch.nn.functional.pad(step, (0, blocks - step.shape[2]), value=value)
