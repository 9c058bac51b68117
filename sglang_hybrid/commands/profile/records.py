"""What one exact decode leaves behind for ``simulation`` and ``share_costs``."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerRecord:
    """One layer over all steps, padded to the blocks of the longest row."""

    scores: torch.Tensor  # [steps, rows, KV heads, blocks], of the predicted query
    real_scores: torch.Tensor  # likewise, of the real one: they say what becomes resident
    shares: torch.Tensor  # likewise: attention that the block gets with the real query, mean over the query heads
    counts: torch.Tensor  # [steps, rows] blocks


@dataclass(frozen=True)
class BlockParts:
    """What each block contributes to an exact attention."""

    shares: torch.Tensor  # [rows, KV heads, group, blocks]
    outputs: torch.Tensor  # [rows, KV heads, group, blocks, value dim], the sum over blocks is the attention's output
