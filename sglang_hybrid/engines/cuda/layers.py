"""What one layer has in the pool and on the device."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.ops.cuda.digests import HostPool, LayerDigests


@dataclass(frozen=True)
class DeviceLayer:
    pool: HostPool
    digests: LayerDigests


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
