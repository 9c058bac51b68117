"""Tensors of one layer in the host pool and on the device, and sizes that all layers share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.ops.cuda.digests import HostPool, LayerDigests, digest_pages
from sglang_hybrid.ops.cuda.key_codes import LayerCodes


@dataclass(frozen=True)
class DeviceLayer:
    pool: HostPool
    digests: LayerDigests
    codes: LayerCodes | None = None  # of single keys; None: the policy keeps none
    steps: torch.Tensor | None = None  # [4, KV heads, dim]: of codes in slots; None: slots keep numbers

    def summarise(self, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """Write digests, sketches and codes of ``pages`` ``[n]``. The arguments are those of ``digest_pages``."""
        digest_pages(self.digests, keys, pages, filled)
        if self.codes is not None:
            self.codes.encode_pages(keys, pages, filled)


@dataclass(frozen=True)
class DeviceShape:
    """Sizes that never change while a server runs."""

    rows: int  # rows of SGLang's ``req_to_token``, with the row of padding
    max_batch: int  # maximum number of rows in one step
    max_blocks: int  # maximum number of blocks of a row
    heads: int  # KV heads
    group: int  # query heads per KV head
    dim: int
    pool_pages: int
