"""The dense window of a row: which of its blocks are in the window, and in which slot of the ring.

The window holds the newest blocks of a row, the tail (the block being filled) included. When a block opens at the end,
the oldest block leaves. Blocks are aligned with the pages of the host pool, so a window of n blocks holds from
``32 * (n - 1) + 1`` to ``32 * n`` tokens: as in the paper, eviction is by whole blocks, and a block leaves when the
window is full. The window has no sink.

The ring is one slot for each block of the window::

    block   5   6   7   8   9        a window of 5 slots: block p is in slot p % 5
    slot    0   1   2   3   4
    block  10   6   7   8   9        block 10 opens in the slot of block 5, which leaves
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.reference import NO_BLOCK
from sglang_hybrid.policies.hgca.options import HgcaOptions


@dataclass(frozen=True)
class Window:
    """The size of a row's window, which depends on the row's length."""

    least_blocks: int
    ratio: Fraction  # of the row's blocks, where that is more than ``least_blocks``; at most 1

    @classmethod
    def of(cls, options: HgcaOptions) -> Window:
        # by its decimal digits: 0.1 of 10 blocks is one block
        return cls(options.window_tokens // BLOCK_TOKENS, Fraction(str(options.window_ratio)))

    def blocks(self, count: int) -> int:
        """Return the blocks in the window of a row of ``count`` blocks; more than ``count`` for short rows.

        The number grows by at most one from one count to the next, so no block ever returns to a window.
        """
        return max(self.least_blocks, math.ceil(self.ratio * count))

    def first(self, count: int) -> int:
        """Return the position of the oldest block in the window of a row of ``count`` blocks."""
        return max(0, count - self.blocks(count))

    def slots(self, count: int) -> int:
        """Return the number of slots that rows of up to ``count`` blocks use."""
        # a window that grows would change the slots of its blocks, unless no slot is used twice
        return min(count, self.least_blocks) if self.ratio == 0 else count

    def slot_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of the blocks at ``positions`` of a row."""
        return positions % self.least_blocks if self.ratio == 0 else positions


def ring_positions(first: torch.Tensor, counts: torch.Tensor, slots: int) -> torch.Tensor:
    """Return the position of the block in each slot, ``[B, slots]``; NO_BLOCK in slots without a block of the window.

    ``first`` ``[B]``: each row's oldest block in the window. ``counts`` ``[B]``: each row's number of blocks.
    """
    last = counts[:, None] - 1
    newest = last - (last - torch.arange(slots, device=counts.device)) % slots  # newest block that ever had the slot
    return newest.masked_fill(newest < first[:, None], NO_BLOCK)
