"""The data of one exact decode that ``simulation`` and ``share_costs`` work on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerRecord:
    """Scores and attention of one layer at all decode steps, padded to the number of blocks of the longest row."""

    scores: torch.Tensor  # [steps, rows, KV heads, blocks], by the predicted query
    real_scores: torch.Tensor  # same shape, by the real query: they choose what becomes resident
    shares: torch.Tensor  # same shape: a block's share of the real query's attention, mean over the query heads
    counts: torch.Tensor  # [steps, rows] number of blocks


@dataclass(frozen=True)
class BlockParts:
    """The contribution of each block to exact attention."""

    shares: torch.Tensor  # [rows, KV heads, group, blocks], of each query head's attention
    outputs: torch.Tensor  # [rows, KV heads, group, blocks, value dim], the sum over blocks is the attention's output
