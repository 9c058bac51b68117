"""Measures which channels of the keys tell most about attention."""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.memory.sketches import channel_order

_QUERIES = 64  # of a text, from its second half
_ALWAYS_IN = 1, 3  # blocks: sink; recent and tail. Nobody asks a sketch about them


class ChannelSpread:
    """Of one layer: what each channel adds to the logits of attended tokens that their blocks' digests do not tell.

    A digest has the middle of each channel's range. A token's distance from it, times the query, is what a sketch of
    the channel knows better. It is squared and weighted by attention: a channel may vary much in keys that nobody
    attends to.
    """

    def __init__(self, rotary_dim: int, neox: bool) -> None:
        """``rotary_dim`` and ``neox``: which two channels the model rotates together."""
        self._rotary_dim, self._neox = rotary_dim, neox
        self._of_texts: list[torch.Tensor] = []

    def add(self, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Of one text, after rotation: queries ``[tokens, query heads, dim]``, keys ``[tokens, KV heads, dim]``."""
        size = min(BLOCK_TOKENS, keys.shape[0])
        blocks = keys[: keys.shape[0] // size * size].float().unflatten(0, (-1, size))
        middle = (blocks.amax(dim=1, keepdim=True) + blocks.amin(dim=1, keepdim=True)) / 2
        distances = (blocks - middle).square().flatten(0, 1)
        tokens, heads, dim = distances.shape
        at = torch.linspace(tokens // 2, tokens - 1, min(_QUERIES, tokens), device=keys.device).long()
        asked = queries[at].float().unflatten(1, (heads, -1))  # [queries, KV heads, group, dim]
        logits = torch.einsum("qhgd,nhd->hqgn", asked, blocks.flatten(0, 1)) * dim**-0.5
        counted = _selectable(at, tokens, size)[None, :, None]
        attention = logits.masked_fill(~counted, -torch.inf).softmax(dim=-1)
        seen = torch.einsum("hqgn,nhd->qhgd", attention, distances)
        self._of_texts.append((seen * asked.square()).mean(dim=(0, 2)).cpu())

    def order(self) -> torch.Tensor:
        """Channels of each KV head, the most telling first: ``[KV heads, head_dim]``."""
        return channel_order(torch.stack(self._of_texts).mean(dim=0), self._rotary_dim, self._neox)


def _selectable(at: torch.Tensor, tokens: int, size: int) -> torch.Tensor:
    """``[queries, tokens]``: whether a sketch decides about the token, for a query at ``at``."""
    sink, recent = _ALWAYS_IN
    token = torch.arange(tokens, device=at.device)
    block, of_query = token // size, (at // size)[:, None]
    selectable = (block >= sink) & (block <= of_query - recent)
    # in a short text all blocks are always in
    earlier = token <= at[:, None]
    return torch.where(selectable.any(dim=1, keepdim=True), selectable, earlier)
