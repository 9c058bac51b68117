"""Whether running rows may be in device memory as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hybrid.blocks import BLOCK_TOKENS

_GATHER_BYTES_S = 50e9  # of PCIe 5
_MOST_OF_TIME = 0.1  # that loading rows may take of the time between two loadings
_SPARE = 0.05  # of device memory: rows that begin to be held grow, and would have to leave soon


def loading_pays(loaded: float, seconds: float) -> bool:
    """Whether so many bytes are loaded in a small part of the time since that was last done."""
    return loaded / _GATHER_BYTES_S <= _MOST_OF_TIME * seconds


class WholeRequestMode:
    """Rows are held as soon as all of them fit, and no longer than that.

    Leaving costs copies on the device, or a step in which nothing is resident where a policy has no use for them.
    Coming back costs the time that loading takes, so it waits until that is a small part of the time since the rows
    were last held: where requests come and go around the limit, they are not loaded again and again.
    """

    def __init__(self, pages: int, block_bytes: int) -> None:
        """``block_bytes``: of a block of a row in all layers and KV heads."""
        self.pages, self._block_bytes = pages, block_bytes
        self.is_dense = True
        self._left = float("-inf")  # when

    def decide(self, lengths: Sequence[int], now: float) -> bool:
        """Whether rows of these lengths are held in the step that begins now."""
        blocks = sum(-(-length // BLOCK_TOKENS) for length in lengths)
        if self.is_dense:
            if blocks > self.pages:
                self.is_dense, self._left = False, now
        elif blocks <= self.pages * (1 - _SPARE):
            self.is_dense = loading_pays(blocks * self._block_bytes, now - self._left)
        return self.is_dense
