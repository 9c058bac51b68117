"""Device memory for blocks of all rows, and the table of resident blocks."""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.digests import SlotTable
from sglang_hybrid.ops.cuda.slot_codes import SlotCodes, no_factors
from sglang_hybrid.ops.reference import NO_BLOCK


class BlockMemory:
    """Keys and values of ``slots`` blocks for every layer, row and KV head: ``[rows, KV heads, slots, 32, dim]``.

    ``dtype``: the pool's, or uint8 for codes of 8 bits.
    """

    def __init__(
        self, layers: int, rows: int, heads: int, slots: int, dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        of_layer = (rows, heads, slots, BLOCK_TOKENS, dim)
        # zeros, because a slot that was never written is multiplied by a weight of 0, and garbage may be NaN
        self.keys = [torch.zeros(of_layer, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(of_layer, dtype=dtype, device=device) for _ in range(layers)]
        self._factors = [no_factors(keys) for keys in self.keys] if dtype == torch.uint8 else []

    def codes(self, layer: int, steps: torch.Tensor | None) -> SlotCodes | None:
        """Return what the layer's codes need, with the ``steps`` of their channels; None if slots keep numbers."""
        return SlotCodes(steps, self._factors[layer]) if self._factors and steps is not None else None


class ResidentSlots(BlockMemory):
    """Block memory divided into slots per row and KV head, and the block that each slot holds."""

    def __init__(
        self, layers: int, rows: int, heads: int, slots: int, dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(layers, rows, heads, slots, dim, dtype, device)
        self.all_positions = torch.full((layers, rows, heads, slots), NO_BLOCK, dtype=torch.int32, device=device)

    def positions(self, layer: int) -> torch.Tensor:
        """Return the block of its row that each slot holds: ``[rows, KV heads, slots]``, -1 for an empty slot."""
        return self.all_positions[layer]

    def table(self, layer: int, sink: int, recent: int) -> SlotTable:
        return SlotTable(self.all_positions[layer], sink, recent)

    def forget(self, rows: torch.Tensor) -> None:
        """Mark all slots of ``rows`` ``[n]`` int64 as empty."""
        self.all_positions.index_fill_(1, rows, NO_BLOCK)

    def forget_all(self) -> None:
        self.all_positions.fill_(NO_BLOCK)
