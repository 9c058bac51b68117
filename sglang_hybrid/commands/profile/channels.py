"""Measures which channels of the keys tell most about attention."""

from __future__ import annotations

import torch

from sglang_hybrid.memory.sketches import channel_order
from sglang_hybrid.policies.scout.predictor import QueryPredictor, QueryWeights


class ChannelSpread:
    """Of one layer: how much each channel of its queries and keys varies over some texts."""

    def __init__(self, weights: QueryWeights) -> None:
        self._weights = weights
        self._predictor = QueryPredictor(weights)
        self._queries: list[torch.Tensor] = []
        self._keys: list[torch.Tensor] = []

    def add(self, inputs: torch.Tensor, keys: torch.Tensor) -> None:
        """The layer's own inputs ``[tokens, hidden]`` and its keys ``[KV heads, tokens, head_dim]``, of one text."""
        positions = torch.arange(inputs.shape[0], device=inputs.device)
        queries = self._predictor.query(inputs, positions).float()  # the real ones: these are the layer's own inputs
        grouped = queries.unflatten(1, (keys.shape[0], -1))
        self._queries.append(grouped.square().mean(dim=(0, 2)).cpu())
        # what all keys of a head have in common moves all logits alike, and attention does not see it
        self._keys.append(keys.float().var(dim=1).cpu())

    def order(self) -> torch.Tensor:
        """Channels of each KV head, the most telling first: ``[KV heads, head_dim]``."""
        queries, keys = (torch.stack(of_texts).mean(dim=0) for of_texts in (self._queries, self._keys))
        return channel_order((queries * keys).sqrt(), self._weights.rotary.shape[-1], self._weights.neox)
