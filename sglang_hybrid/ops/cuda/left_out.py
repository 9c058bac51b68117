"""What stands for candidates that are not attended: the mean of the row's values, beside the attended candidates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.ops.cuda.digests import HostPool, SlotTable
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.slot_codes import SlotCodes, code_addresses
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.structs import KernelStruct, struct
from sglang_hybrid.ops.cuda.tensors import HALVES, address, dtype_code, pools_for


@dataclass(frozen=True)
class LeftOut:
    """Arguments of ``reference.with_left_out``. Weights and means belong to rows, not to batch entries."""

    near_lse: torch.Tensor  # [B, H * G]
    weights: torch.Tensor  # [rows, H, G]
    means: torch.Tensor  # [rows, H, D]
    row_of: torch.Tensor  # [B]


def left_out_arguments(left_out: LeftOut | None, batch: int, query_heads: int, dim: int) -> KernelStruct:
    if left_out is None:
        return struct("left_out")
    rows, heads, group = left_out.weights.shape
    return struct(
        "left_out",
        near_lse=address("near_lse", left_out.near_lse, torch.float32, (batch, query_heads)),
        weights=address("weights", left_out.weights, torch.float32, (rows, heads, query_heads // heads)),
        means=address("means", left_out.means, torch.float32, (rows, heads, dim)),
        row_of=address("row_of", left_out.row_of, torch.int32, (batch,)),
        rows=rows,
        group=group,
    )


def mean_values(
    pool: HostPool,
    step: Step,
    means: torch.Tensor,
    dtype: torch.dtype,
    *,
    sink: int,
    recent: int,
    only: torch.Tensor | None = None,
) -> None:
    """Write ``reference.sampled_mean`` of each row of ``step`` to ``means`` ``[rows, H, D]``.

    ``dtype``: of the model. With ``only`` (``[B]`` int32), entries that have 0 there are skipped. Pages that are not in
    the pool do not count.
    """
    launch("mean_values", **_mean_arguments(pool, step, means, dtype, sink, recent, only))


def near_lse(
    query: torch.Tensor,
    key_slots: torch.Tensor,
    table: SlotTable,
    step: Step,
    scale: float,
    near_bias: torch.Tensor,
    out: torch.Tensor,
    *,
    pool: HostPool,
    means: torch.Tensor,
    begins: torch.Tensor,
    codes: SlotCodes | None = None,
) -> torch.Tensor:
    """Write the LSE of sink, recent and tail blocks, with their bias, to ``out`` ``[B, H * G]``, and return ``out``.

    query ``[B, H * G, D]``, near_bias ``[rows, H, G]``. Blocks that are not in slots do not count. Rows of entries with
    ``begins`` ``[B]`` 1, and those of ``reference.is_sampled_again``, get their ``means``, as by ``mean_values``.
    """
    batch, query_heads, dim = query.shape
    rows, heads, slots = table.positions.shape
    group = query_heads // heads
    of_slots = (rows, heads, slots, pool.keys.shape[2], dim)
    mean = _mean_arguments(pool, step, means, query.dtype, table.sink, table.recent, begins)
    launch(
        "near_lse",
        query=address("query", query, HALVES, (batch, query_heads, dim)),
        keys=address("keys of slots", key_slots, pools_for(query.dtype) if codes is None else torch.uint8, of_slots),
        **code_addresses(codes, key_slots),
        near_bias=address("near_bias", near_bias, torch.float32, (rows, heads, group)),
        near_lse=address("near_lse", out, torch.float32, (batch, query_heads)),
        table=table.arguments(heads),
        mean=struct("mean_values", **mean),
        scale=scale,
        group=group,
    )
    return out


def _mean_arguments(
    pool: HostPool,
    step: Step,
    means: torch.Tensor,
    dtype: torch.dtype,
    sink: int,
    recent: int,
    only: torch.Tensor | None,
) -> dict[str, object]:
    pages, heads, _, dim = pool.values.shape
    rows = means.shape[0]
    return {
        "step": step.arguments(),
        "values": pool.region.address_of("values of the pool", pool.values),
        "only": address("only", only, torch.int32, (step.batch,)),
        "means": address("means", means, torch.float32, (rows, heads, dim)),
        "rows": rows,
        "kv_heads": heads,
        "head_dim": dim,
        "dtype": dtype_code(pool.values.dtype, dtype),
        "pool_pages": pages,
        "sink": sink,
        "recent": recent,
    }
