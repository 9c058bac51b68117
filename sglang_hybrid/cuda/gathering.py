"""Blocks from the host pool to slots in device memory, read by the GPU over PCIe."""

from __future__ import annotations

import torch

from sglang_hybrid.cuda.host_memory import RegisteredRegion
from sglang_hybrid.cuda.library import launch, library
from sglang_hybrid.cuda.structs import GatherBlocks
from sglang_hybrid.cuda.tensors import address

CTAS = 32


def gather_blocks(
    region: RegisteredRegion,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    *,
    destinations: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    active_rows: torch.Tensor | None = None,
    refused: torch.Tensor | None = None,
    ctas: int = CTAS,
) -> None:
    """Copy blocks of a layer, keys and values ``[pages, H, 32, D]`` in ``region``, to slots ``[owners, H, N, 32, D]``.

    Two forms:

    * ``pages`` ``[owners, H, N]`` int32, -1 for no block: each to the slot of the same place, as
      ``reference.gather_blocks``; owners from ``active_rows`` on are left alone.
    * ``pages`` and ``destinations`` ``[n]`` int32, of which ``count`` (one int32 in device memory) are there: to slot
      ``(owner * H + head) * N + place``, which says what KV head it is.

    Page and slot numbers are checked on the device. Entries out of bounds are left out and added to ``refused`` (one
    int64).
    ``ctas``: more do not make PCIe faster, and take room from what runs beside.
    """
    owners, heads, slots, *block = key_slots.shape
    if tuple(keys.shape[1:]) != (heads, *block) or values.shape != keys.shape:
        raise ValueError(
            f"blocks of {tuple(keys.shape)} and {tuple(values.shape)} do not fit slots {tuple(key_slots.shape)}"
        )
    if (destinations is None) != (pages.dim() == 3):
        raise ValueError("pages are [owners, H, N], or a list with destinations")
    if destinations is None:
        if count is not None:
            raise ValueError("a count belongs to a list with destinations; active_rows to pages [owners, H, N]")
        shape: tuple[int, ...] = (owners, heads, slots)
        counted, per_count = active_rows, heads * slots
    else:
        counted, per_count, shape = count, 1, (pages.numel(),)
    arguments = GatherBlocks(
        keys=region.address_of("keys", keys),
        values=region.address_of("values", values),
        key_slots=address("key_slots", key_slots, keys.dtype, tuple(key_slots.shape)),
        value_slots=address("value_slots", value_slots, values.dtype, tuple(key_slots.shape)),
        pages=address("pages", pages, torch.int32, shape),
        destinations=address("destinations", destinations, torch.int32, shape),
        count=None if counted is None else address("the number of entries", counted.view(-1), torch.int32, (1,)),
        refused=None if refused is None else address("refused", refused.view(-1), torch.int64, (1,)),
        destination_slots=owners * heads * slots,
        per_count=per_count,
        capacity=pages.numel(),
        pool_pages=keys.shape[0],
        kv_heads=heads,
        slots=slots,
        block_bytes=keys[0, 0].numel() * keys.itemsize,
        ctas=ctas,
    )
    launch(library().sh_cuda_gather_blocks, arguments)
