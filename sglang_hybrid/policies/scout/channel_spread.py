"""Measures which channels of the keys tell most about attention."""

from __future__ import annotations

import torch

from sglang_hybrid.memory.sketches import channel_order


class ChannelSpread:
    """Of one layer: how much each channel of its queries and keys varies over some texts."""

    def __init__(self, rotary_dim: int, neox: bool) -> None:
        """``rotary_dim`` and ``neox``: which two channels the model rotates together."""
        self._rotary_dim, self._neox = rotary_dim, neox
        self._queries: list[torch.Tensor] = []
        self._keys: list[torch.Tensor] = []

    def add(self, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Of one text, after rotation: queries ``[tokens, query heads, dim]``, keys ``[tokens, KV heads, dim]``."""
        grouped = queries.float().unflatten(1, (keys.shape[1], -1))
        self._queries.append(grouped.square().mean(dim=(0, 2)).cpu())
        # what all keys of a head have in common moves all logits alike, and attention does not see it
        self._keys.append(keys.float().var(dim=0).cpu())

    def order(self) -> torch.Tensor:
        """Channels of each KV head, the most telling first: ``[KV heads, head_dim]``."""
        queries, keys = (torch.stack(of_texts).mean(dim=0) for of_texts in (self._queries, self._keys))
        return channel_order((queries * keys).sqrt(), self._rotary_dim, self._neox)
