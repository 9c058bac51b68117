"""Attention over blocks that are read from the host pool over PCIe: misses without a worker's reply, or whole rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.attention import AttendWorkspace, Partial, side_arguments
from sglang_hybrid.ops.cuda.digests import HostPool
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.tensors import HALVES, address, bit_words, dtype_code, pools_for

_EVERYTHING: dict[str, Any] = {"least_score": 0.0, "sink": 0, "recent": 0}  # without scores, all blocks are attended


@dataclass(frozen=True)
class WorthBlocks:
    """Choice of the blocks that whole rows attend to: blocks that score at least ``least``, sink, recent and tail.

    Blocks whose bit in ``held`` is set are left out: the partial attention ``local`` of ``finish_late`` has them.
    """

    scores: torch.Tensor  # [rows, H, max_blocks]
    bias: torch.Tensor  # [rows, H, G], added to the logits of sink, recent and tail blocks
    least: float
    sink: int  # number of sink blocks
    recent: int  # number of recent blocks
    held: torch.Tensor | None = None  # [B, H, words of max_blocks bits]


def finish_late(
    query: torch.Tensor,
    pool: HostPool,
    step: Step,
    pages: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    local: Partial,
    out: torch.Tensor,
    *,
    served: torch.Tensor,
    workspace: AttendWorkspace,
    whole: torch.Tensor | None = None,
    worth: WorthBlocks | None = None,
    masks: torch.Tensor | None = None,
) -> None:
    """Attend to the listed blocks for batch entries with ``served`` ``[B]`` 0, and write the merge with ``local``.

    query and out ``[B, H * G, D]``; pages ``[B, H, N]``, of which the first ``counts`` ``[B, H]`` are valid; all blocks
    are full. With ``masks`` ``[B, H, N]``, only tokens whose bit is set are attended. Entries with ``whole`` ``[B]`` 1
    attend to their row instead, served or not: to all blocks of the row, or to those that ``worth`` selects. Pages that
    are not in the pool are skipped. Outputs of all other entries are not written, so this can follow every wait for the
    mailbox in a CUDA graph. ``reference.attend_blocks`` is the specification.
    """
    batch, query_heads, dim = query.shape
    heads = pool.keys.shape[1]
    launch(
        "finish_late",
        pages=address("pages", pages, torch.int32, (batch, heads, pages.shape[2])),
        masks=None if masks is None else address("masks", masks, torch.int32, (batch, heads, pages.shape[2])),
        counts=address("counts", counts, torch.int32, (batch, heads)),
        served=address("served", served, torch.int32, (batch,)),
        whole=None if whole is None else address("whole", whole, torch.int32, (batch,)),
        local=side_arguments(local, (batch, query_heads, dim)),
        most_blocks=pages.shape[2],
        **_worth_arguments(worth, batch, heads, query_heads // heads, step.max_blocks),
        **_common_arguments(query, pool, step, scale, workspace, out),
    )


def attend_pool(
    query: torch.Tensor, pool: HostPool, step: Step, scale: float, *, workspace: AttendWorkspace, out: torch.Tensor
) -> torch.Tensor:
    """Attend to all tokens of each row of ``step`` and return ``out``: query and ``out`` ``[B, H * G, D]``.

    The step's own tokens must be in the pool. Pages that are not in the pool are skipped. Outputs of entries from the
    step's ``active_rows`` on are not written.
    """
    launch("finish_late", most_blocks=0, **_EVERYTHING, **_common_arguments(query, pool, step, scale, workspace, out))
    return out


def _worth_arguments(worth: WorthBlocks | None, batch: int, heads: int, group: int, max_blocks: int) -> dict[str, Any]:
    if worth is None:
        return _EVERYTHING
    rows = worth.scores.shape[0]
    return {
        "scores": address("scores", worth.scores, torch.float32, (rows, heads, max_blocks)),
        "bias": address("bias", worth.bias, torch.float32, (rows, heads, group)),
        "held": address("held", worth.held, torch.int32, (batch, heads, bit_words(max_blocks))),
        "least_score": worth.least,
        "sink": worth.sink,
        "recent": worth.recent,
    }


def _common_arguments(
    query: torch.Tensor, pool: HostPool, step: Step, scale: float, workspace: AttendWorkspace, out: torch.Tensor
) -> dict[str, Any]:
    batch, query_heads, dim = query.shape
    pool_pages, heads = pool.keys.shape[:2]
    if workspace.shape != (batch, heads, query_heads // heads, dim) or step.batch != batch:
        raise ValueError(
            f"the workspace is for {workspace.shape}, the step for {step.batch} rows, queries are {tuple(query.shape)}"
        )
    of_pool = (pool_pages, heads, BLOCK_TOKENS, dim)
    for name, part in (("keys", pool.keys), ("values", pool.values)):
        if tuple(part.shape) != of_pool or part.dtype not in pools_for(query.dtype):
            raise ValueError(
                f"the pool's {name} are {tuple(part.shape)} of {part.dtype}, not {of_pool} of {query.dtype} or FP8"
            )
    return {
        "query": address("query", query, HALVES, (batch, query_heads // heads * heads, dim)),
        "keys": pool.region.address_of("keys of the pool", pool.keys),
        "values": pool.region.address_of("values of the pool", pool.values),
        "step": step.arguments(),
        "out": address("out", out, query.dtype, (batch, query_heads, dim)),
        "partial_out": workspace.out.data_ptr(),
        "partial_lse": workspace.lse.data_ptr(),
        "arrived": workspace.arrived.data_ptr(),
        "scale": scale,
        "kv_heads": heads,
        "group": query_heads // heads,
        "head_dim": dim,
        "dtype": dtype_code(pool.keys.dtype, query.dtype),
        "pool_pages": pool_pages,
        "units": workspace.units,
    }
