"""What engines need of the KV pool."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_hybrid.memory.digests import CompactDigests, Digests
from sglang_hybrid.memory.key_codes import KeyCodes
from sglang_hybrid.memory.sketches import Sketches
from sglang_hybrid.protocol.region import SharedRegion


class KVPool(Protocol):
    """Paged keys and values in shared host memory, and what is known of each page on the model's device."""

    k_buffer: list[torch.Tensor]  # of each layer: [pages, KV heads, tokens of a page, head_dim]
    v_buffer: list[torch.Tensor]
    region: SharedRegion
    digests: Digests | CompactDigests | None  # None: under policies that need none
    sketches: Sketches | None
    codes: KeyCodes | None
    head_num: int
    head_dim: int
    v_head_dim: int
    layer_num: int
    dtype: torch.dtype  # of keys and values: the model's, or reference.FP8
    device: str  # of the model

    def store(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write K and V of new tokens, and summarise the pages they are in."""
