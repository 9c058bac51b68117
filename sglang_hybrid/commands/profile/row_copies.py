"""Copies of rows of the host pool, kept on the device while one decode of these rows is recorded."""

from __future__ import annotations

import torch

from sglang_hybrid.core import LayerCache
from sglang_hybrid.policies.full import read_row

_SPARE_TOKENS = 1024  # tokens by which a row may grow before its copy is allocated again


class RowCopies:
    """K and V of some rows in all layers. Each step copies only the blocks with new tokens.

    Rows may only grow: use another object after a row was rewound or replaced.
    """

    def __init__(self) -> None:
        # by layer and row: K, V and length in tokens
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, int]] = {}

    def read(
        self, cache: LayerCache, row: int, pages: torch.Tensor, length: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a row like ``read_row``, as views of the copies. ``row``: index of the row in the batch."""
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
