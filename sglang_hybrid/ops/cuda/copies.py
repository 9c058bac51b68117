"""Copies of blocks between the host pool and device memory over PCIe, and of new tokens to staged pages.

Single blocks are copied by kernels. Runs of pages are copied by the GPU's copy engines: an engine needs a command for
every run, but takes no multiprocessors from kernels. On Hopper, attention uses all registers of a multiprocessor, so a
copy kernel that runs at the same time takes whole multiprocessors away from attention.
"""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.host_memory import RegisteredRegion
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.slot_codes import SlotCodes, code_addresses
from sglang_hybrid.ops.cuda.tensors import HALVES, address, dtype_code, pools_for

GATHER_CTAS = 16  # fill the link; a GEMM beside a gather gets the processors that are left
SCATTER_CTAS = 16


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
    codes: SlotCodes | None = None,
    taken_ns: torch.Tensor | None = None,
    ctas: int = GATHER_CTAS,
) -> None:
    """Copy blocks of a layer, keys and values ``[pages, H, 32, D]`` in ``region``, to slots ``[owners, H, N, 32, D]``.

    Two forms:

    * ``pages`` ``[owners, H, N]`` int32, -1 for no block: each block is copied to the slot with the same indices, as in
      ``reference.gather_blocks``. Slots of owners from ``active_rows`` on are not written.
    * ``pages`` and ``destinations`` ``[n]`` int32, of which the first ``count`` (one int32 in device memory) are valid:
      block i is copied to slot ``destinations[i]`` = ``(owner * H + head) * N + slot``, which also gives the KV head.

    Page and slot numbers are checked on the device. Entries out of bounds are skipped, and their number is added to
    ``refused`` (one int64). With ``codes`` the slots get codes, as for ``attend_slots``. The time of the
    launch is added to ``taken_ns`` (one int64). ``ctas``: more CTAs do not make PCIe faster, and slow down kernels that
    run concurrently.
    """
    owners, heads, slots = key_slots.shape[:3]
    in_slots = keys.dtype if codes is None else torch.uint8
    _check_blocks(keys, values, key_slots)
    if (destinations is None) != (pages.dim() == 3):
        raise ValueError("pages are [owners, H, N], or a list with destinations")
    if destinations is None:
        if count is not None:
            raise ValueError("a count belongs to a list with destinations; active_rows to pages [owners, H, N]")
        shape: tuple[int, ...] = (owners, heads, slots)
        counted, per_count = active_rows, heads * slots
    else:
        counted, per_count, shape = count, 1, (pages.numel(),)
    launch(
        "gather_blocks",
        keys=region.address_of("keys", keys),
        values=region.address_of("values", values),
        key_slots=address("key_slots", key_slots, in_slots, tuple(key_slots.shape)),
        value_slots=address("value_slots", value_slots, in_slots, tuple(key_slots.shape)),
        **code_addresses(codes, key_slots),
        pages=address("pages", pages, torch.int32, shape),
        destinations=address("destinations", destinations, torch.int32, shape),
        count=None if counted is None else address("the number of entries", counted.view(-1), torch.int32, (1,)),
        refused=None if refused is None else address("refused", refused.view(-1), torch.int64, (1,)),
        taken_ns=None if taken_ns is None else address("taken_ns", taken_ns.view(-1), torch.int64, (1,)),
        destination_slots=owners * heads * slots,
        per_count=per_count,
        capacity=pages.numel(),
        pool_pages=keys.shape[0],
        kv_heads=heads,
        slots=slots,
        block_bytes=keys[0, 0].numel() * keys.itemsize,
        ctas=ctas,
        dtype=0 if codes is None else dtype_code(keys.dtype),
    )


def scatter_blocks(
    region: RegisteredRegion,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    *,
    refused: torch.Tensor | None = None,
    ctas: int = SCATTER_CTAS,
) -> None:
    """Copy slots ``[owners, H, N, 32, D]`` to a layer of the pool, keys and values ``[pages, H, 32, D]`` in ``region``.

    pages ``[owners, H, N]`` int32: the page to which the slot with the same indices is copied, -1 for none. Page
    numbers are checked on the device. Entries out of bounds are skipped, and their number is added to ``refused`` (one
    int64). For a KV head, each page may be listed only once.
    """
    owners, heads, slots = key_slots.shape[:3]
    _check_blocks(keys, values, key_slots)
    launch(
        "scatter_blocks",
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


def _check_blocks(keys: torch.Tensor, values: torch.Tensor, key_slots: torch.Tensor) -> None:
    heads, block = key_slots.shape[1], key_slots.shape[3:]
    if tuple(keys.shape[1:]) != (heads, *block) or values.shape != keys.shape:
        raise ValueError(
            f"blocks of {tuple(keys.shape)} and {tuple(values.shape)} do not fit slots {tuple(key_slots.shape)}"
        )


def copy_runs(
    region: RegisteredRegion,
    keys: torch.Tensor,
    values: torch.Tensor,
    runs: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    *,
    to_pool: bool,
) -> None:
    """Copy pages of a layer, keys and values ``[pages, H, 32, D]`` in ``region``, to or from slots of that shape.

    runs ``[n, 3]`` int32 in host memory: first page, first slot, number of pages. ``to_pool`` copies slots to pages.
    Raises CudaError if a run is out of bounds.
    """
    if keys.shape != values.shape or keys.shape[1:] != key_slots.shape[1:]:
        raise ValueError(
            f"pages of {tuple(keys.shape)} and {tuple(values.shape)} do not fit slots {tuple(key_slots.shape)}"
        )
    if runs.dtype != torch.int32 or runs.device.type != "cpu" or not runs.is_contiguous() or runs.shape[1:] != (3,):
        raise ValueError(f"runs are {tuple(runs.shape)} of {runs.dtype} on {runs.device}, must be [n, 3] int32 in host")
    region.address_of("keys", keys)  # checks that the memory is registered: otherwise copies would wait for each other
    region.address_of("values", values)
    launch(
        "copy_runs",
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        key_slots=address("key_slots", key_slots, keys.dtype, tuple(key_slots.shape)),
        value_slots=address("value_slots", value_slots, values.dtype, tuple(key_slots.shape)),
        runs=runs.data_ptr(),
        page_bytes=keys[0].numel() * keys.itemsize,
        count=runs.shape[0],
        pool_pages=keys.shape[0],
        staged_pages=key_slots.shape[0],
        to_pool=int(to_pool),
    )


def place_tokens(
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    *,
    refused: torch.Tensor | None = None,
) -> None:
    """Copy keys and values ``[tokens, H, D]`` to slots ``[slots, H, 32, D]`` of the same dtype or FP8.

    places ``[tokens]`` int32: destination ``32 * slot + token of the page``, -1 for none. Destinations are checked on
    the device. Tokens with one out of bounds are skipped, and their number is added to ``refused`` (one int64). The
    stride between tokens is free, so keys and values may be slices of the output of a fused projection.
    """
    tokens, heads, dim = keys.shape
    of_slots = (key_slots.shape[0], heads, BLOCK_TOKENS, dim)
    launch(
        "place_tokens",
        keys=_address_of_tokens("keys", keys, (tokens, heads, dim), HALVES),
        values=_address_of_tokens("values", values, (tokens, heads, dim), (keys.dtype,)),
        key_slots=address("key_slots", key_slots, pools_for(keys.dtype), of_slots),
        value_slots=address("value_slots", value_slots, key_slots.dtype, of_slots),
        places=address("places", places, torch.int32, (tokens,)),
        refused=None if refused is None else address("refused", refused.view(-1), torch.int64, (1,)),
        key_stride=keys.stride(0),
        value_stride=values.stride(0),
        most_places=key_slots.shape[0] * BLOCK_TOKENS,
        tokens=tokens,
        kv_heads=heads,
        head_dim=dim,
        dtype=dtype_code(key_slots.dtype, keys.dtype),
    )


def _address_of_tokens(
    name: str, tensor: torch.Tensor, shape: tuple[int, int, int], dtypes: tuple[torch.dtype, ...]
) -> int:
    if not tensor.is_cuda or tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} are {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}, must be {shape} of "
            f"{' or '.join(map(str, dtypes))} on a CUDA device"
        )
    pointer: int = tensor.data_ptr()
    if tensor.stride()[1:] != (shape[2], 1) or tensor.stride(0) % 8 or pointer % 16:
        raise ValueError(f"a token of {name} must be contiguous and aligned to 16 bytes, strides are {tensor.stride()}")
    return pointer
