"""Selection of tokens or blocks by InfiniGen, from speculated attention logits.

Shapes are as in ``ops/reference.py``; n is the number of items (tokens or blocks) of a row. The last item of a row is
always selected: the token that is decoded, whose key was not in the cache when logits were speculated, or its block.
"""

from __future__ import annotations

import torch

from sglang_hybrid.core import BlockList, DecodeBatch
from sglang_hybrid.ops import reference


def below_best(logits: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return each token's logit minus the query head's best one, for the query head of a group where it is highest.

    logits ``[B, H, G, n]``, lengths ``[B]`` -> ``[B, H, n]``, at most 0; ``-inf`` from a row's last token on. A group
    shares what is fetched, and its query heads have logits of different sizes: each compares with its own best.
    """
    earlier = torch.arange(logits.shape[3], device=logits.device) < lengths[:, None] - 1
    lowest = torch.finfo(logits.dtype).min  # for a page filled with NaN: still better than no token
    known = logits.nan_to_num(nan=lowest, posinf=lowest, neginf=lowest)
    known = known.masked_fill(~earlier[:, None, None, :], -torch.inf)
    best = known.amax(dim=3, keepdim=True).clamp(min=lowest)
    return (known - best).amax(dim=2).clamp(min=lowest).masked_fill(~earlier[:, None, :], -torch.inf)


def best_of_blocks(below: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Return the value of each block's best token: ``[B, H, N * T]`` -> ``[B, H, N]``."""
    best: torch.Tensor = below.unflatten(2, (-1, block_tokens)).amax(dim=3)
    return best


def choose(below: torch.Tensor, counts: torch.Tensor, alpha: float, limit: int) -> torch.Tensor:
    """Choose what each KV head attends to: below ``[B, H, n]``, counts ``[B]`` of items -> bool ``[B, H, n]``.

    A KV head wants the items that are less than ``alpha`` below the best. All KV heads of a row get the same number of
    items, the average of what they want, each its best ones; with the last item no more than ``limit``.
    """
    position = torch.arange(below.shape[2], device=below.device)
    last = position == counts[:, None] - 1
    ranked = below.masked_fill(last[:, None, :], -torch.inf)
    wanted = (ranked > -alpha).sum(dim=2)
    number = (wanted.sum(dim=1) // below.shape[1]).clamp(max=limit - 1)
    # a stable order: the first of equal items is chosen, on every device
    order = ranked.argsort(dim=2, descending=True, stable=True)
    chosen = torch.zeros_like(below, dtype=torch.bool)
    chosen.scatter_(2, order, (position < number[:, None])[:, None, :].expand_as(chosen))
    return chosen | last[:, None, :]


def list_of_tokens(chosen: torch.Tensor, batch: DecodeBatch, block_tokens: int) -> BlockList:
    """List the blocks that have a chosen token, with masks of these tokens: chosen ``[B, H, N * T]``."""
    of_blocks = chosen.unflatten(2, (-1, block_tokens))
    positions = _positions(of_blocks.any(dim=3))
    # int64 holds 32 bits without a sign; the last one becomes the sign of int32
    bits = (of_blocks.to(torch.int64) << torch.arange(block_tokens, device=chosen.device)).sum(dim=3)
    masks = bits.gather(2, positions.clamp(min=0)).to(torch.int32)
    return BlockList(*_pages(positions, batch, block_tokens), masks)


def list_of_blocks(chosen: torch.Tensor, batch: DecodeBatch, block_tokens: int) -> BlockList:
    """List the chosen blocks, with all of their tokens: chosen ``[B, H, N]``."""
    return BlockList(*_pages(_positions(chosen), batch, block_tokens))


def _pages(positions: torch.Tensor, batch: DecodeBatch, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        reference.block_ids(positions, batch.page_table),
        reference.block_fill(positions, batch.lengths, block_tokens),
    )


def _positions(chosen: torch.Tensor) -> torch.Tensor:
    """Return the positions of True in ``[B, H, N]``, ascending, padded with ``NO_BLOCK`` to the longest list."""
    longest = int(chosen.sum(dim=2).max()) if chosen.numel() else 0
    order = (~chosen).to(torch.uint8).argsort(dim=2, stable=True)[..., :longest]
    return order.masked_fill(~chosen.gather(2, order), reference.NO_BLOCK)
