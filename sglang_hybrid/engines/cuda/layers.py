"""What one layer has in the pool and on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.ops.cuda.digests import HostPool, LayerDigests, digest_pages
from sglang_hybrid.ops.cuda.key_codes import LayerCodes


@dataclass(frozen=True)
class DeviceLayer:
    pool: HostPool
    digests: LayerDigests
    codes: LayerCodes | None = None  # of single keys, under policies that keep them

    def summarise(self, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """Digests, sketches and codes of ``pages`` ``[n]``: arguments as for ``digest_pages``."""
        digest_pages(self.digests, keys, pages, filled)
        if self.codes is not None:
            self.codes.encode_pages(keys, pages, filled)


@dataclass(frozen=True)
class DeviceShape:
    """Sizes that never change while a server runs."""

    rows: int  # that SGLang knows, the one of padding included
    max_batch: int  # rows of a step
    max_blocks: int  # of a row
    heads: int
    group: int
    dim: int
    pool_pages: int
