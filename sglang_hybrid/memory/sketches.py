"""A few channels of every key, on the device that selects: what a block's extremes do not tell."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Three bits of mantissa do not change which blocks are selected, and keys are far from this format's limits.
DTYPE = torch.float8_e4m3fn

_VALUES = torch.arange(256, dtype=torch.uint8).view(DTYPE).float()


@dataclass(frozen=True)
class LayerSketch:
    """One layer's sketch: ``tokens`` [pages, KV heads, block tokens, channels] of ``channels`` [KV heads, channels]."""

    tokens: torch.Tensor
    channels: torch.Tensor

    def of_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """pages ``[...]`` -> ``[..., KV heads, block tokens, channels]``, as float32."""
        # as bytes: torch cannot index with float8 on every device
        chosen = self.tokens.view(torch.uint8)[pages]
        if chosen.is_cuda:
            return chosen.view(DTYPE).float()
        # a table of all 256 values is several times as fast as torch's conversion on a CPU
        return _VALUES.index_select(0, chosen.flatten().int()).view(chosen.shape)


class Sketches:
    """The most telling channels of the keys of every (layer, page, KV head), kept up to date with the digests.

    Which ones they are differs between KV heads; ``choose`` says it before the first key is written.
    """

    def __init__(self, channels: int, layers: int, pages: int, heads: int, page_tokens: int, device: str) -> None:
        self._shape = (heads, channels)
        self._tokens = [
            torch.zeros(pages, heads, page_tokens, channels, dtype=DTYPE, device=device) for _ in range(layers)
        ]
        first = torch.arange(channels, device=device).expand(heads, -1).contiguous()
        self._channels = [first for _ in range(layers)]

    @staticmethod
    def bytes_per_page(channels: int, layers: int, heads: int, page_tokens: int) -> int:
        return layers * heads * page_tokens * channels * DTYPE.itemsize

    def choose(self, layer: int, order: torch.Tensor) -> None:
        """order ``[KV heads, head_dim]``: all channels of each KV head, the most telling first."""
        heads, channels = self._shape
        assert order.shape[0] == heads and order.shape[1] >= channels
        self._channels[layer] = order[:, :channels].to(self._tokens[layer].device, torch.int64).contiguous()

    def of_layer(self, layer: int) -> LayerSketch:
        return LayerSketch(self._tokens[layer], self._channels[layer])

    def refresh(self, layer: int, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """Recompute the sketches of ``pages`` of the pool ``keys``, whose first ``filled`` tokens are valid."""
        table, channels = self._tokens[layer], self._channels[layer]
        blocks = keys[pages.to(keys.device)].to(table.device)  # [n, heads, tokens, head_dim]
        chosen = blocks.gather(3, channels[None, :, None, :].expand(len(blocks), -1, blocks.shape[2], -1))
        empty = torch.arange(blocks.shape[2], device=table.device) >= filled.to(table.device)[:, None]
        # as bytes: torch cannot index with float8 on every device
        as_bytes = chosen.float().masked_fill(empty[:, None, :, None], 0.0).to(DTYPE).view(torch.uint8)
        table.view(torch.uint8)[pages.to(table.device)] = as_bytes


def channel_order(importance: torch.Tensor, rotary_dim: int, neox: bool) -> torch.Tensor:
    """Channels by importance ``[KV heads, head_dim]``, best first; the two that are rotated together stay together.

    Rotation mixes a pair over positions, so neither is worth much without the other.
    """
    heads, dim = importance.shape
    position = torch.arange(dim)
    if neox:
        half = rotary_dim // 2
        pair = torch.where(position < rotary_dim, position % max(half, 1), position)
    else:
        pair = torch.where(position < rotary_dim, position // 2, position)
    total = torch.zeros(heads, dim).index_add_(1, pair, importance.float().cpu())
    # a stable sort by the pair's sum, then by the pair, keeps partners side by side
    of_channel = total.gather(1, pair.expand(heads, -1))
    by_pair = pair.expand(heads, -1).argsort(dim=1, stable=True)
    return by_pair.gather(1, of_channel.gather(1, by_pair).argsort(dim=1, descending=True, stable=True))
