"""State that policy hgca keeps per layer: moving averages of the window's tokens, and contextual sets."""

from __future__ import annotations

import torch


class LayerState:
    """State of one layer, for all rows with state, by entry (``RowEntries``). Tensors grow; new elements are zero.

    ::

        maw    [entry][KV head][slot of the ring][token]   float32
        masks  [entry][KV head][block of the row]          int32, bit t: token t is salient

    ``maw`` is the moving average of the attention weight (MAW) of tokens in the window. When a block leaves the window,
    its averages determine the block's mask, and another block takes the slot. Blocks in the window have the mask 0.
    """

    def __init__(self, heads: int, block_tokens: int, device: torch.device) -> None:
        self.maw = torch.zeros(0, heads, 0, block_tokens, device=device)
        self.masks = torch.zeros(0, heads, 0, dtype=torch.int32, device=device)

    def grow(self, entries: int, slots: int, blocks: int) -> None:
        """Grow the tensors to at least these numbers of entries, slots of the ring and blocks of a row."""
        self.maw = _grown(self.maw, {0: entries, 2: slots})
        self.masks = _grown(self.masks, {0: entries, 2: blocks})


def _grown(tensor: torch.Tensor, needed: dict[int, int]) -> torch.Tensor:
    """Return the tensor with at least the ``needed`` sizes by dimension. A dimension that grows at least doubles."""
    shape = list(tensor.shape)
    for dim, size in needed.items():
        if size > shape[dim]:
            shape[dim] = max(size, 2 * shape[dim])
    if shape == list(tensor.shape):
        return tensor
    larger = tensor.new_zeros(shape)
    larger[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return larger
