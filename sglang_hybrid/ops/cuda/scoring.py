"""Scores of all blocks of a batch by a query, and correction of LSEs that a predicted query has computed."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from sglang_hybrid.ops.cuda.digests import LayerDigests
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.structs import KernelStruct
from sglang_hybrid.ops.cuda.tensors import active_address, address
from sglang_hybrid.ops.reference import DIGEST_SPREAD


class ScoreWorkspace:
    """Device memory for the estimates of all query heads. Launches that run concurrently need separate workspaces."""

    def __init__(
        self, batch: int, heads: int, group: int, max_blocks: int, device: torch.device | str = "cuda"
    ) -> None:
        self.estimates = torch.empty(batch, heads, group, max_blocks, dtype=torch.float32, device=device)

    def of_batch(self, count: int) -> ScoreWorkspace:
        """Return the part that a smaller batch needs, in the same memory."""
        part = copy.copy(self)
        part.estimates = self.estimates[:count]
        return part


@dataclass(frozen=True)
class PendingScores:
    """Computed estimates from which ``select_blocks`` or ``share_scores`` computes scores, on the same stream."""

    arguments: KernelStruct
    scores: torch.Tensor


_DIMS, _CHANNELS, _MOST_GROUP = (64, 128), (0, 32, 64), 16


def _group_of(query: torch.Tensor, digests: LayerDigests) -> int:
    """Return the number of query heads per KV head. Raises ValueError for shapes that the kernels do not support."""
    heads, dim = digests.heads, digests.dim
    channels = 0 if digests.codes is None else 2 * digests.codes.shape[3]
    group = query.shape[1] // heads
    if dim not in _DIMS or channels not in _CHANNELS or not 1 <= group <= _MOST_GROUP:
        raise ValueError(
            f"blocks are estimated for head_dim {_DIMS}, {_CHANNELS} sketch channels and up to {_MOST_GROUP} query "
            f"heads per KV head, not for {dim}, {channels} and {group}"
        )
    return group


def score_blocks(
    query: torch.Tensor,
    digests: LayerDigests,
    step: Step,
    scale: float,
    workspace: ScoreWorkspace,
    scores: torch.Tensor,
    *,
    by_row: bool = False,
    query_by_row: bool = False,
    only: torch.Tensor | None = None,
) -> PendingScores:
    """Estimate all blocks by query ``[B, H * G, D]``, for ``reference.block_scores`` ``[B, H, max_blocks]`` float32.

    Estimates are computed now, from sketches, or from digests alone if the layer has no sketches. ``scores`` are not
    written yet: ``select_blocks`` writes them when it gets the returned object. With ``by_row`` scores are
    ``[rows, H, max_blocks]``, and with ``query_by_row`` queries are ``[rows, H * G, D]``. With ``only`` (``[B]`` int32)
    this and ``select_blocks`` skip entries that have 0 there.
    """
    if query_by_row and not by_row:
        raise ValueError("queries of rows make scores of rows")
    batch, heads = step.batch, digests.heads
    group = _group_of(query, digests)
    owners = scores.shape[0] if by_row else batch
    queries = owners if query_by_row else batch
    arguments = launch(
        "score_blocks",
        digests=digests.arguments(),
        step=step.arguments(),
        query=address("query", query, digests.dtype, (queries, heads * group, digests.dim)),
        estimates=address(
            "the workspace's estimates", workspace.estimates, torch.float32, (batch, heads, group, step.max_blocks)
        ),
        scores=address("scores", scores, torch.float32, (owners, heads, step.max_blocks)),
        only=address("only", only, torch.int32, (batch,)),
        scale=scale,
        spread=DIGEST_SPREAD,
        group=group,
        by_row=owners if by_row else 0,
        query_by_row=query_by_row,
    )
    return PendingScores(arguments, scores)


def share_scores(pending: PendingScores) -> None:
    """Write scores that are equal for all KV heads of an entry: the logarithm of the sum of the heads' shares.

    ``select_blocks`` must then be called without ``put_off``. Scores of entries that ``only`` skips are not written.
    """
    launch("share_scores", scored=pending.arguments)


def shift_lse(
    query: torch.Tensor,
    query_ahead: torch.Tensor,
    digests: LayerDigests,
    pages: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    lse: torch.Tensor,
    *,
    active_rows: torch.Tensor | None = None,
) -> None:
    """Add ``reference.lse_shift`` to ``lse`` ``[B, H * G]``: the LSE over ``pages`` of the predicted ``query_ahead``.

    queries ``[B, H * G, D]``; pages ``[B, H, N]``, of which the first ``counts`` ``[B, H]`` are valid.
    """
    batch, query_heads, dim = query.shape
    heads, dtype = digests.heads, digests.dtype
    launch(
        "shift_lse",
        digests=digests.arguments(),
        query=address("query", query, dtype, (batch, query_heads, digests.dim)),
        query_ahead=address("query_ahead", query_ahead, dtype, (batch, query_heads, dim)),
        pages=address("pages", pages, torch.int32, (batch, heads, pages.shape[2])),
        counts=address("counts", counts, torch.int32, (batch, heads)),
        active_rows=active_address(active_rows),
        lse=address("lse", lse, torch.float32, (batch, query_heads)),
        scale=scale,
        batch=batch,
        group=_group_of(query, digests),
        most_misses=pages.shape[2],
    )
