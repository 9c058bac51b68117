"""Digests of every page of the host pool, on the model's device, where blocks are selected."""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import compact_bytes
from sglang_hybrid.memory.sketches import Sketches
from sglang_hybrid.ops import reference


class Digests:
    """One min/max digest per (layer, page, KV head). Code that writes keys has to refresh it.

    Layout, one tensor a layer::

        [page][KV head][max, min][head_dim]

    Digests have a dtype in which the extremes of the pool's keys are exact: the pool's, or for FP8 a larger one.
    Requests with a common prefix share pages, and so digests. A freed page needs no care:
    the next writer of its first token starts the digest anew.
    """

    def __init__(self, layers: int, pages: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        shape = (pages, heads, 2, head_dim)
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    def of_layer(self, layer: int) -> torch.Tensor:
        return self._layers[layer]

    def refresh(self, layer: int, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """Recompute the digests of ``pages`` of the pool ``keys``, whose first ``filled`` tokens are valid."""
        table = self._layers[layer]
        blocks = keys[pages.to(keys.device)].to(table.device)
        pages = pages.to(table.device)
        table[pages] = reference.minmax_digest(blocks, filled.to(table.device)).to(table.dtype)


class CompactDigests:
    """Min/max digests in the format of ``reference.compact_digest``, for the channels that ``sketches`` store.

    Layout, one tensor a layer::

        [page][KV head][compact_bytes]
    """

    def __init__(self, sketches: Sketches, layers: int, pages: int, heads: int, head_dim: int, device: str) -> None:
        size = compact_bytes(head_dim, sketches.channels)
        self._sketches = sketches
        self._layers = [torch.zeros(pages, heads, size, dtype=torch.uint8, device=device) for _ in range(layers)]

    def of_layer(self, layer: int) -> torch.Tensor:
        return self._layers[layer]

    def refresh(self, layer: int, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """Recompute digests, as ``Digests.refresh`` does. Refresh the sketches of these pages afterwards."""
        table, channels = self._layers[layer], self._sketches.of_layer(layer).channels
        blocks = keys[pages.to(keys.device)].to(table.device)
        digests = reference.minmax_digest(blocks, filled.to(table.device))
        table[pages.to(table.device)] = reference.compact_digest(digests, channels)
