"""Interface of the KV pool for engines."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_hybrid.memory.digests import CompactDigests, Digests
from sglang_hybrid.memory.key_codes import KeyCodes
from sglang_hybrid.memory.sketches import Sketches
from sglang_hybrid.protocol.region import SharedRegion


class KVPool(Protocol):
    """Paged keys and values in shared host memory, with digests, sketches and codes on the model's device."""

    k_buffer: list[torch.Tensor]  # of each layer: [pages, KV heads, tokens of a page, head_dim]
    v_buffer: list[torch.Tensor]
    region: SharedRegion
    digests: Digests | CompactDigests | None  # None: the policy needs no digests
    sketches: Sketches | None
    codes: KeyCodes | None
    head_num: int
    head_dim: int
    v_head_dim: int
    layer_num: int
    dtype: torch.dtype  # of keys and values: the model's, or reference.FP8
    device: str  # of the model

    def store(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values of new tokens to ``slots`` ``[T]``, and refresh the digests of their pages."""
