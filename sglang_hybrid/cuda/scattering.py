"""Blocks from slots in device memory to the host pool, written by the GPU over PCIe."""

from __future__ import annotations

import torch

from sglang_hybrid.cuda.host_memory import RegisteredRegion
from sglang_hybrid.cuda.library import launch, library
from sglang_hybrid.cuda.prefill_structs import ScatterBlocks
from sglang_hybrid.cuda.tensors import address

CTAS = 16


def scatter_blocks(
    region: RegisteredRegion,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    *,
    refused: torch.Tensor | None = None,
    ctas: int = CTAS,
) -> None:
    """Copy slots ``[owners, H, N, 32, D]`` to a layer of the pool, keys and values ``[pages, H, 32, D]`` in ``region``.

    pages ``[owners, H, N]`` int32: where the block of the same place goes, -1 for nowhere. Page numbers are checked on
    the device; those out of bounds are left out and added to ``refused`` (one int64). No page may be in the list twice
    for a KV head.
    """
    owners, heads, slots, *block = key_slots.shape
    if tuple(keys.shape[1:]) != (heads, *block) or values.shape != keys.shape:
        raise ValueError(
            f"blocks of {tuple(keys.shape)} and {tuple(values.shape)} do not fit slots {tuple(key_slots.shape)}"
        )
    arguments = ScatterBlocks(
        key_slots=address("key_slots", key_slots, keys.dtype, tuple(key_slots.shape)),
        value_slots=address("value_slots", value_slots, values.dtype, tuple(key_slots.shape)),
        keys=region.address_of("keys", keys),
        values=region.address_of("values", values),
        pages=address("pages", pages, torch.int32, (owners, heads, slots)),
        refused=None if refused is None else address("refused", refused.view(-1), torch.int64, (1,)),
        capacity=pages.numel(),
        pool_pages=keys.shape[0],
        kv_heads=heads,
        slots=slots,
        block_bytes=keys[0, 0].numel() * keys.itemsize,
        ctas=ctas,
    )
    launch(library().sh_cuda_scatter_blocks, arguments)
