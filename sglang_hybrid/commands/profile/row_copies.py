"""Rows of the host pool, kept on the device while one decode over them is recorded."""

from __future__ import annotations

import torch

from sglang_hybrid.core import LayerCache
from sglang_hybrid.policies.full import read_row

_SPARE_TOKENS = 1024  # that a row may grow by before its copy is made anew


class RowCopies:
    """K and V of some rows in all layers. A step only reads the block that the last step wrote to, and what follows.

    For rows that grow: one that begins anew needs another object.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, int]] = {}  # by layer and row: and length

    def read(
        self, cache: LayerCache, row: int, pages: torch.Tensor, length: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like ``read_row``. ``row``: its number in the batch."""
        key, value, known = self._kept.get((cache.layer, row), (None, None, 0))
        first = known // cache.block_tokens
        start = first * cache.block_tokens
        new_key, new_value = read_row(cache, pages[first:], length - start, device)
        if key is None or value is None or length > key.shape[1]:
            grown = [
                part.new_empty(part.shape[0], length + _SPARE_TOKENS, part.shape[2]) for part in (new_key, new_value)
            ]
            if key is not None and value is not None:
                for new, old in zip(grown, (key, value), strict=True):
                    new[:, :start] = old[:, :start]
            key, value = grown
        key[:, start:length], value[:, start:length] = new_key, new_value
        self._kept[cache.layer, row] = key, value, length
        return key[:, :length], value[:, :length]
