"""Decision whether the running rows are held in device memory as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hybrid.blocks import BLOCK_TOKENS

_GATHER_BYTES_S = 50e9  # bytes per second of a gather over PCIe 5
_MOST_OF_TIME = 0.1  # maximum share of the time since rows were last held that loading them may take
_SPARE = 0.05  # share of device memory that must stay free when rows are loaded: rows grow, and would be evicted soon


def loading_pays(loaded: float, seconds: float) -> bool:
    """Return True if loading ``loaded`` bytes would take at most a tenth of ``seconds``."""
    return loaded / _GATHER_BYTES_S <= _MOST_OF_TIME * seconds


class WholeRequestMode:
    """Decides before each step whether all running rows are held in device memory as a whole.

    Rows are held until they no longer fit. To stop holding rows costs copies on the device, or, if the policy does not
    use these copies, a step without resident blocks. To hold rows again costs the time of loading them, so the mode
    waits until this time is a small part of the time since rows were last held. Otherwise requests that come and go
    around the limit would be loaded again and again.
    """

    def __init__(self, pages: int, block_bytes: int) -> None:
        """``pages``: pages in device memory. ``block_bytes``: bytes of a page, in all layers and KV heads."""
        self.pages, self._block_bytes = pages, block_bytes
        self.is_dense = True
        self._left = float("-inf")  # time at which rows were last held

    def decide(self, lengths: Sequence[int], now: float) -> bool:
        """Return whether rows of ``lengths`` tokens are held in the step that begins at ``now``, in seconds."""
        blocks = sum(-(-length // BLOCK_TOKENS) for length in lengths)
        if self.is_dense:
            if blocks > self.pages:
                self.is_dense, self._left = False, now
        elif blocks <= self.pages * (1 - _SPARE):
            self.is_dense = loading_pays(blocks * self._block_bytes, now - self._left)
        return self.is_dense
