"""Moving averages of attention weights, and selection of salient tokens by them (HGCA), in plain torch.

As in ``reference.py``, fast versions have the same names and signatures. ``reference.py`` also explains the letters in
shapes. MAW is the paper's abbreviation for a token's moving average of attention weights. The query heads of a group
share one MAW, as they share a KV head: the average of the largest of their weights.
"""

from __future__ import annotations

import torch

from sglang_hybrid.ops.reference import NO_BLOCK


def move_averages(maw: torch.Tensor, weights: torch.Tensor, is_new: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the MAW after one more step (HGCA, Algorithm 1, line 8): ``(1 - alpha) * maw + alpha * weights``.

    maw ``[B, H, N, T]``; weights ``[B, H, G, N, T]``, of which the largest of each group counts; is_new ``[B, N, T]``
    marks tokens of this step, whose average so far is 0.
    """
    return (1 - alpha) * maw.masked_fill(is_new[:, None], 0.0) + alpha * weights.amax(dim=2)


def salient_masks(averages: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Return bit masks of tokens whose MAW, or largest weight, exceeds ``least`` (HGCA, Algorithm 1, lines 20 and 23).

    averages ``[B, H, N, 32]``, least ``[B]`` -> ``[B, H, N]``, int32, bit t for token t of a block. ``least`` 0 selects
    every token, also tokens with average 0.
    """
    least = least.view(-1, 1, 1, 1)
    salient = (averages > least) | (least <= 0)
    bit = torch.ones((), dtype=torch.int64, device=averages.device) << torch.arange(32, device=averages.device)
    return (salient * bit).sum(dim=3).to(torch.int32)  # bit 31 becomes the sign


def list_masks(masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """List the blocks whose mask has any token: masks ``[B, H, blocks]`` -> positions and their masks ``[B, H, N]``.

    Positions are ascending, then ``NO_BLOCK`` with mask 0. N is the length of the longest list.
    """
    listed = masks != 0
    longest = int(listed.sum(dim=2).max()) if masks.numel() else 0
    order = (~listed).to(torch.uint8).argsort(dim=2, stable=True)[..., :longest]
    return order.masked_fill(~listed.gather(2, order), NO_BLOCK), masks.gather(2, order)
