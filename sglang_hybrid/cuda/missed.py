"""Misses that the worker did not compute in time: attention over blocks in the host pool, with the real query.

Both operations look at ``served`` ``[B]``, which waiting for the mailbox has written, and do nothing for entries that
are served: they can follow every wait in a CUDA graph.
"""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.cuda import lane_structs as structs
from sglang_hybrid.cuda.attention import Partial, side_arguments
from sglang_hybrid.cuda.digests import HostPool
from sglang_hybrid.cuda.library import launch, library
from sglang_hybrid.cuda.tensors import HALVES, active_address, address, dtype_code


def attend_missed(
    query: torch.Tensor,
    pool: HostPool,
    pages: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    served: torch.Tensor | None = None,
    active_rows: torch.Tensor | None = None,
) -> None:
    """``reference.attend_blocks`` of entries that are not served: out ``[B, H * G, D]``, lse ``[B, H * G]``, float32.

    query ``[B, H * G, D]``; pages ``[B, H, N]`` of which the first ``counts`` ``[B, H]`` are there, full blocks all of
    them. Pages that are not in the pool are left out. Served entries keep what they have.
    """
    arguments = _arguments(query, pool, pages, counts, scale, served, active_rows)
    arguments.out = address("out", out, torch.float32, tuple(query.shape))
    arguments.lse = address("lse", lse, torch.float32, tuple(query.shape[:2]))
    launch(library().sh_cuda_attend_missed, arguments)


def finish_late(
    query: torch.Tensor,
    pool: HostPool,
    pages: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    local: Partial,
    out: torch.Tensor,
    *,
    served: torch.Tensor,
    active_rows: torch.Tensor | None = None,
) -> None:
    """``attend_missed``, merged with ``local`` to ``out``, in the dtype of queries."""
    shape = (query.shape[0], query.shape[1], query.shape[2])
    arguments = structs.FinishLate(
        missed=_arguments(query, pool, pages, counts, scale, served, active_rows),
        local=side_arguments(local, shape),
        out=address("out", out, query.dtype, shape),
    )
    launch(library().sh_cuda_finish_late, arguments)


def _arguments(
    query: torch.Tensor,
    pool: HostPool,
    pages: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    served: torch.Tensor | None,
    active_rows: torch.Tensor | None,
) -> structs.AttendMissed:
    batch, query_heads, dim = query.shape
    pool_pages, heads = pool.keys.shape[:2]
    of_pool = (pool_pages, heads, BLOCK_TOKENS, dim)
    for name, part in (("keys", pool.keys), ("values", pool.values)):
        if tuple(part.shape) != of_pool or part.dtype != query.dtype:
            raise ValueError(
                f"the pool's {name} are {tuple(part.shape)} of {part.dtype}, not {of_pool} of {query.dtype}"
            )
    return structs.AttendMissed(
        query=address("query", query, HALVES, (batch, query_heads // heads * heads, dim)),
        keys=pool.region.address_of("keys of the pool", pool.keys),
        values=pool.region.address_of("values of the pool", pool.values),
        pages=address("pages", pages, torch.int32, (batch, heads, pages.shape[2])),
        counts=address("counts", counts, torch.int32, (batch, heads)),
        served=address("served", served, torch.int32, (batch,)),
        active_rows=active_address(active_rows),
        scale=scale,
        batch=batch,
        kv_heads=heads,
        group=query_heads // heads,
        head_dim=dim,
        dtype=dtype_code(query.dtype),
        most_misses=pages.shape[2],
        pool_pages=pool_pages,
    )
