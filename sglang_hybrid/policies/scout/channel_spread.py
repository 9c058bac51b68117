"""Measures which channels of the keys tell most about attention."""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.memory.sketches import channel_order


class ChannelSpread:
    """Of one layer: how large its queries are in each channel, and how much keys of a block differ there."""

    def __init__(self, rotary_dim: int, neox: bool) -> None:
        """``rotary_dim`` and ``neox``: which two channels the model rotates together."""
        self._rotary_dim, self._neox = rotary_dim, neox
        self._queries: list[torch.Tensor] = []
        self._keys: list[torch.Tensor] = []

    def add(self, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Of one text, after rotation: queries ``[tokens, query heads, dim]``, keys ``[tokens, KV heads, dim]``."""
        grouped = queries.float().unflatten(1, (keys.shape[1], -1))
        self._queries.append(grouped.square().mean(dim=(0, 2)).cpu())
        # What the keys of a block have in common is in its digest. Channels that turn slowly with the position vary
        # most over a text, and hardly within a block.
        tokens = min(BLOCK_TOKENS, keys.shape[0])
        blocks = keys[: keys.shape[0] // tokens * tokens].float().unflatten(0, (-1, tokens))
        self._keys.append(blocks.var(dim=1).mean(dim=0).cpu())

    def order(self) -> torch.Tensor:
        """Channels of each KV head, the most telling first: ``[KV heads, head_dim]``."""
        queries, keys = (torch.stack(of_texts).mean(dim=0) for of_texts in (self._queries, self._keys))
        return channel_order((queries * keys).sqrt(), self._rotary_dim, self._neox)
