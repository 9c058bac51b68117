"""Digests of every page of the host pool, on the device that selects."""

from __future__ import annotations

import torch

from sglang_hybrid.memory.sketches import Sketches
from sglang_hybrid.ops import reference


class Digests:
    """One min/max digest per (layer, page, KV head), kept up to date by whoever writes keys.

    Layout, one tensor a layer::

        [page][KV head][max, min][head_dim]

    Pages are shared between requests with a common prefix, and so are their digests. A
    freed page needs no care: the next writer of its first token starts the digest anew.
    """

    def __init__(self, layers: int, pages: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        shape = (pages, heads, 2, head_dim)
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    @staticmethod
    def bytes_per_page(layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return layers * heads * 2 * head_dim * dtype.itemsize

    def of_layer(self, layer: int) -> torch.Tensor:
        return self._layers[layer]

    def refresh(self, layer: int, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """Recompute the digests of ``pages`` of the pool ``keys``, whose first ``filled`` tokens are valid."""
        table = self._layers[layer]
        blocks = keys[pages.to(keys.device)].to(table.device)
        pages = pages.to(table.device)
        table[pages] = reference.minmax_digest(blocks, filled.to(table.device)).to(table.dtype)


def is_compact(digest_dtype: str, channels: int, head_dim: int, device: str) -> bool:
    """Whether digests are ``CompactDigests``.

    ``auto``: on a GPU, where reading digests is most of what scoring takes, if these shapes have a compact form.
    """
    if digest_dtype == "auto":
        fits = channels > 0 and channels % 8 == 0 and head_dim % 32 == 0
        return fits and torch.device(device).type != "cpu"
    return digest_dtype == "int8" and channels > 0


class CompactDigests:
    """Min/max digests as ``reference.compact_digest`` stores them, for what ``sketches`` holds.

    Layout, one tensor a layer::

        [page][KV head][compact_bytes]
    """

    def __init__(self, sketches: Sketches, layers: int, pages: int, heads: int, head_dim: int, device: str) -> None:
        size = reference.compact_bytes(head_dim, sketches.channels)
        self._sketches = sketches
        self._layers = [torch.zeros(pages, heads, size, dtype=torch.uint8, device=device) for _ in range(layers)]

    @staticmethod
    def bytes_per_page(layers: int, heads: int, head_dim: int, channels: int) -> int:
        return layers * heads * reference.compact_bytes(head_dim, channels)

    def of_layer(self, layer: int) -> torch.Tensor:
        return self._layers[layer]

    def refresh(self, layer: int, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """As ``Digests.refresh``; the sketches of these pages are to be made anew after it."""
        table, channels = self._layers[layer], self._sketches.of_layer(layer).channels
        blocks = keys[pages.to(keys.device)].to(table.device)
        digests = reference.minmax_digest(blocks, filled.to(table.device))
        table[pages.to(table.device)] = reference.compact_digest(digests, channels)
