"""What one layer keeps for its rows: moving averages of the window's tokens, and contextual sets."""

from __future__ import annotations

import torch


class LayerState:
    """Tensors for all rows with state, by entry (``RowEntries``). They grow; what is new is zero.

    ::

        maw    [entry][KV head][slot of the ring][token]   float32
        masks  [entry][KV head][block of the row]          int32, bit t: token t is salient

    ``maw`` is the moving average of the attention weight (MAW). It moves with its block: when a block leaves the
    window, its averages decide on the block's mask, and the slot is another block's. Blocks of the window have the
    mask 0.
    """

    def __init__(self, heads: int, block_tokens: int, device: torch.device) -> None:
        self.maw = torch.zeros(0, heads, 0, block_tokens, device=device)
        self.masks = torch.zeros(0, heads, 0, dtype=torch.int32, device=device)

    def grow(self, entries: int, slots: int, blocks: int) -> None:
        """Have room for at least so many of each."""
        self.maw = _grown(self.maw, {0: entries, 2: slots})
        self.masks = _grown(self.masks, {0: entries, 2: blocks})


def _grown(tensor: torch.Tensor, needed: dict[int, int]) -> torch.Tensor:
    """The tensor with at least so many places in each dimension that is named: twice as many where it was too small."""
    shape = list(tensor.shape)
    for dim, size in needed.items():
        if size > shape[dim]:
            shape[dim] = max(size, 2 * shape[dim])
    if shape == list(tensor.shape):
        return tensor
    larger = tensor.new_zeros(shape)
    larger[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return larger
