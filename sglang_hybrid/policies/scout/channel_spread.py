"""Measure which channels of the keys say most about attention."""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.memory.sketches import channel_order

_QUERIES = 64  # sampled from the second half of each text
_ALWAYS_IN = 1, 3  # blocks: sink; recent and tail. They are attended to without a look at their sketches


class ChannelSpread:
    """How much each channel of one layer adds to the logits of attended tokens, beyond what block digests say.

    A digest has the middle of each channel's range. A sketch of the channel also knows a token's distance from this
    middle, which adds distance times query to the logit. This product is squared and weighted by attention, because a
    channel may vary much in keys that get no attention.
    """

    def __init__(self, rotary_dim: int, neox: bool) -> None:
        """``rotary_dim`` and ``neox`` say which two channels the model rotates together."""
        self._rotary_dim, self._neox = rotary_dim, neox
        self._of_texts: list[torch.Tensor] = []

    def add(self, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Add a text's rotated queries ``[tokens, query heads, dim]`` and keys ``[tokens, KV heads, dim]``."""
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
        """Return the channels of each KV head, the most informative first: ``[KV heads, head_dim]``."""
        return channel_order(torch.stack(self._of_texts).mean(dim=0), self._rotary_dim, self._neox)


def _selectable(at: torch.Tensor, tokens: int, size: int) -> torch.Tensor:
    """Return ``[queries, tokens]``, True if a sketch decides about the token, for queries at positions ``at``."""
    sink, recent = _ALWAYS_IN
    token = torch.arange(tokens, device=at.device)
    block, of_query = token // size, (at // size)[:, None]
    selectable = (block >= sink) & (block <= of_query - recent)
    # in a short text all blocks are always attended to: count all earlier tokens
    earlier = token <= at[:, None]
    return torch.where(selectable.any(dim=1, keepdim=True), selectable, earlier)
