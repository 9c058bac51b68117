"""Digests of every page of the host pool, on the device that selects."""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import compact_bytes
from sglang_hybrid.memory.sketches import Sketches
from sglang_hybrid.ops import reference


class Digests:
    """One min/max digest per (layer, page, KV head), kept up to date by whoever writes keys.

    Layout, one tensor a layer::

        [page][KV head][max, min][head_dim]

    Their dtype is one in which the extremes of the pool's keys are exact: the pool's, or of FP8 a larger one.
    Pages are shared between requests with a common prefix, and so are their digests. A
    freed page needs no care: the next writer of its first token starts the digest anew.
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
    """Min/max digests as ``reference.compact_digest`` stores them, for what ``sketches`` holds.

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
        """As ``Digests.refresh``; the sketches of these pages are to be made anew after it."""
        table, channels = self._layers[layer], self._sketches.of_layer(layer).channels
        blocks = keys[pages.to(keys.device)].to(table.device)
        digests = reference.minmax_digest(blocks, filled.to(table.device))
        table[pages.to(table.device)] = reference.compact_digest(digests, channels)
