"""Sketches: a few channels of every key, on the model's device. They refine what digests say about blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.ops import reference


@dataclass(frozen=True)
class LayerSketch:
    """One layer's sketch: ``codes`` [pages, KV heads, ...] of ``channels`` [KV heads, C].

    A code is a position in the range that the block's digest gives for the channel; see ``reference.sketch_codes``.
    """

    codes: torch.Tensor
    channels: torch.Tensor


class Sketches:
    """The most informative channels of the keys of every (layer, page, KV head), refreshed after the digests.

    The channels differ between KV heads. Call ``choose`` before the first key is written.
    """

    def __init__(self, channels: int, layers: int, pages: int, heads: int, page_tokens: int, device: str) -> None:
        assert channels % 2 == 0
        self.channels = channels
        self._shape = heads, channels
        codes = (pages, heads, page_tokens, channels // 2)
        self._codes = [torch.zeros(codes, dtype=torch.uint8, device=device) for _ in range(layers)]
        first = torch.arange(channels, device=device).expand(heads, -1)
        self._channels = [first.clone() for _ in range(layers)]

    def choose(self, layer: int, order: torch.Tensor) -> None:
        """Sketch the first channels of order ``[KV heads, head_dim]``: all channels, the most informative first."""
        heads, channels = self._shape
        assert order.shape[0] == heads and order.shape[1] >= channels
        self._channels[layer].copy_(order[:, :channels])  # in place: engines hold these tensors

    def of_layer(self, layer: int) -> LayerSketch:
        return LayerSketch(self._codes[layer], self._channels[layer])

    def refresh(self, layer: int, keys: torch.Tensor, digests: torch.Tensor, pages: torch.Tensor) -> None:
        """Recompute the sketches of ``pages`` of the pool ``keys``, whose ``digests`` are up to date."""
        codes = self._codes[layer]
        blocks, pages = keys[pages.to(keys.device)].to(codes.device), pages.to(codes.device)
        codes[pages] = reference.sketch_codes(blocks, digests[pages], self._channels[layer])


def channel_order(importance: torch.Tensor, rotary_dim: int, neox: bool) -> torch.Tensor:
    """Return each KV head's channels by ``importance`` ``[KV heads, head_dim]``, best first, rotated pairs together.

    Rotation mixes the two channels of a pair over positions, so neither says much without the other.
    """
    heads, dim = importance.shape
    pair = rotated_pairs(dim, rotary_dim, neox)
    total = torch.zeros(heads, dim).index_add_(1, pair, importance.float().cpu())
    # a stable sort by the pair's sum, then by the pair, keeps partners side by side
    of_channel = total.gather(1, pair.expand(heads, -1))
    by_pair = pair.expand(heads, -1).argsort(dim=1, stable=True)
    return by_pair.gather(1, of_channel.gather(1, by_pair).argsort(dim=1, descending=True, stable=True))


def rotated_pairs(dim: int, rotary_dim: int, neox: bool) -> torch.Tensor:
    """Return a number ``[dim]`` for each channel: the two channels of a rotated pair share it, no others do."""
    position = torch.arange(dim)
    partner = position % max(rotary_dim // 2, 1) if neox else position // 2
    return torch.where(position < rotary_dim, partner, position)
