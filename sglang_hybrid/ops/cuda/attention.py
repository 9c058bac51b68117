"""Attention over the blocks in device memory, and merging of partial attentions.

    keys, values  [rows, H, S, 32, D]      slots belong to rows, not to batch entries; numbers or codes of 8 bits
    positions     [rows, H, S]             block of the row's sequence, -1: empty

If outputs and workspace are passed in, no function here allocates memory or waits, so each can be captured in a CUDA
graph. Call each function once before capturing: CUDA loads a kernel when it is first launched.
"""

from __future__ import annotations

import ctypes

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.library import checked, launch, library
from sglang_hybrid.ops.cuda.slot_codes import SlotCodes, code_addresses
from sglang_hybrid.ops.cuda.structs import KernelStruct, struct
from sglang_hybrid.ops.cuda.tensors import HALVES, active_address, address, dtype_code, pools_for


class AttendWorkspace:
    """Device memory for partial results of ``attend_slots``. Launches that run concurrently need separate workspaces.

    ``pool``: dtype of keys and values; uint8 for codes.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        group: int,
        head_dim: int,
        device: torch.device | str = "cuda",
        pool: torch.dtype = torch.bfloat16,
    ) -> None:
        units = ctypes.c_uint32()
        checked(library().sh_cuda_attend_units, head_dim, pool.itemsize, ctypes.byref(units))
        self.units = units.value
        self.shape = (batch, heads, group, head_dim)
        self.out = torch.empty(self.units, group, head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(self.units, group, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(batch, heads, dtype=torch.int32, device=device)


def attend_slots(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    row_of: torch.Tensor,
    scale: float,
    *,
    active_rows: torch.Tensor | None = None,
    workspace: AttendWorkspace | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    near_bias: torch.Tensor | None = None,
    sink: int = 0,
    recent: int = 0,
    codes: SlotCodes | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``reference.attend_blocks`` over slots: output ``[B, H * G, D]``, natural-log LSE ``[B, H * G]``, float32.

    query ``[B, H * G, D]``; keys and values have the query's dtype or FP8, or are ``reference.to_codes`` of ``codes``.
    lengths ``[rows]``: tokens of each row;
    row_of ``[B]``: the row of each batch entry. A block at position p has ``min(32, length - 32 p)`` valid tokens.
    Outputs of batch entries from ``active_rows`` on are not written. ``near_bias`` ``[rows, H, G]`` is added to the
    logits of a row's first ``sink`` blocks, of its tail and of the ``recent`` blocks before the tail.
    """
    batch, query_heads, dim = query.shape
    rows, heads, slots = positions.shape
    group = query_heads // heads
    of_slots = (rows, heads, slots, BLOCK_TOKENS, dim)
    if out is None:
        out = torch.empty(batch, query_heads, dim, dtype=torch.float32, device=query.device)
    if lse is None:
        lse = torch.empty(batch, query_heads, dtype=torch.float32, device=query.device)
    if workspace is None:
        workspace = AttendWorkspace(batch, heads, group, dim, query.device, keys.dtype)
    if workspace.shape != (batch, heads, group, dim):
        raise ValueError(f"the workspace is for {workspace.shape}, not for {(batch, heads, group, dim)}")
    launch(
        "attend_slots",
        query=address("query", query, HALVES, (batch, heads * group, dim)),
        keys=address("keys of slots", keys, pools_for(query.dtype) if codes is None else torch.uint8, of_slots),
        values=address("values of slots", values, keys.dtype, of_slots),
        positions=address("positions of slots", positions, torch.int32, (rows, heads, slots)),
        row_of=address("row_of", row_of, torch.int32, (batch,)),
        lengths=address("lengths", lengths, torch.int32, (rows,)),
        active_rows=active_address(active_rows),
        out=address("out", out, torch.float32, (batch, query_heads, dim)),
        lse=address("lse", lse, torch.float32, (batch, query_heads)),
        **code_addresses(codes, keys),
        near_bias=address("near_bias", near_bias, torch.float32, (rows, heads, group)),
        sink=sink,
        recent=recent,
        partial_out=workspace.out.data_ptr(),
        partial_lse=workspace.lse.data_ptr(),
        arrived=workspace.arrived.data_ptr(),
        scale=scale,
        rows=rows,
        batch=batch,
        kv_heads=heads,
        group=group,
        head_dim=dim,
        dtype=dtype_code(keys.dtype if codes is None else query.dtype, query.dtype),
        units=workspace.units,
        slots=slots,
    )
    return out, lse


Partial = tuple[torch.Tensor, torch.Tensor]  # output [B, heads, D] and LSE [B, heads], float32


def merge(
    first: Partial,
    second: Partial,
    *,
    active_rows: torch.Tensor | None = None,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write ``reference.merge(*first, *second)`` to ``out``, in the dtype of ``out``, and return ``out``.

    ``lse``, if given, receives the LSE of the union.
    """
    batch, heads, dim = out.shape
    launch(
        "merge",
        first=side_arguments(first, (batch, heads, dim)),
        second=side_arguments(second, (batch, heads, dim)),
        out=address("out", out, (*HALVES, torch.float32), (batch, heads, dim)),
        lse=address("lse", lse, torch.float32, (batch, heads)),
        active_rows=active_address(active_rows),
        batch=batch,
        heads=heads,
        head_dim=dim,
        dtype=dtype_code(out.dtype),
    )
    return out


def side_arguments(partial: Partial, shape: tuple[int, int, int]) -> KernelStruct:
    out, lse = partial
    return struct(
        "side",
        out=address("a side's output", out, torch.float32, shape),
        lse=address("a side's LSE", lse, torch.float32, shape[:2]),
    )
