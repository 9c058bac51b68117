"""Scores of all blocks of a batch by a query, and what the real query changes about a predicted one."""

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
    """Estimates of every query head. One for all launches that do not run beside each other."""

    def __init__(
        self, batch: int, heads: int, group: int, max_blocks: int, device: torch.device | str = "cuda"
    ) -> None:
        self.estimates = torch.empty(batch, heads, group, max_blocks, dtype=torch.float32, device=device)

    def of_batch(self, count: int) -> ScoreWorkspace:
        """The part that a smaller batch needs, in the same memory."""
        part = copy.copy(self)
        part.estimates = self.estimates[:count]
        return part


@dataclass(frozen=True)
class PendingScores:
    """Estimates that ``select_blocks`` makes scores of, in the same stream."""

    arguments: KernelStruct
    scores: torch.Tensor


_DIMS, _CHANNELS, _MOST_GROUP = (64, 128), (0, 32, 64), 16


def _group_of(query: torch.Tensor, digests: LayerDigests) -> int:
    """Query heads per KV head. Raises ValueError for shapes that the kernels do not have."""
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
    """What ``block_scores`` of the reference has of query ``[B, H * G, D]``, for scores ``[B, H, max_blocks]`` float32.

    Estimates are computed now, by sketches, or by digests alone where there are none. ``select_blocks``
    gets what is returned, and writes the scores. With ``by_row`` scores are ``[rows, H, max_blocks]``, and with
    ``query_by_row`` queries are ``[rows, H * G, D]``. With ``only`` (``[B]`` int32) entries that have 0 there are left
    alone, by ``select_blocks`` too.
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
    """Write the scores, and let all KV heads of an entry have the same: the logarithm of what theirs add up to.

    ``select_blocks`` has nothing to write then. Entries that were left alone have the scores that they had.
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
    """Add ``reference.lse_shift`` to ``lse`` ``[B, H * G]``, which ``query_ahead`` has computed for ``pages``.

    queries ``[B, H * G, D]``; pages ``[B, H, N]`` of which the first ``counts`` ``[B, H]`` are there.
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
