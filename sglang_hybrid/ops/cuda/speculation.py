"""Tokens that partial keys speculate to matter, chosen and copied to device memory one layer ahead: policy infinigen.

A layer's way::

    speculate -> choose_tokens                 lists of blocks with masks of tokens
    gather_tokens                              pool -> staged tokens, one behind the other
    place_tokens, attend_pages                 the step's own token, and attention over what is staged

What ``policies/infinigen/selection.py`` selects. All KV heads of a row get the same number of tokens, so staged tokens
are rows of ``attend_pages``::

    staged keys, values  [B * blocks, H, 32, D]    entry b has blocks b * blocks and following
"""

from __future__ import annotations

import copy

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.copies import GATHER_CTAS
from sglang_hybrid.ops.cuda.digests import HostPool
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.partial_keys import PartialKeyCodes
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.tensors import HALVES, active_address, address

_MOST_SPLITS = 32  # sh_most_splits
_CTAS = 1024  # that fill a device
_QUERY_ROWS = 16


class SpeculationWorkspace:
    """What kernels of one layer leave for each other. ``ranks`` ``[B, H, items]``: larger ones for better items."""

    def __init__(
        self, batch: int, heads: int, max_blocks: int, *, by_block: bool, device: torch.device | str = "cuda"
    ) -> None:
        """``by_block``: items are blocks, and not tokens."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.by_block = by_block
        self.ranks = zeros(batch, heads, max_blocks * (1 if by_block else BLOCK_TOKENS))
        self.wanted, self.chosen = zeros(batch, heads), zeros(batch, heads, max_blocks)
        self.best = torch.zeros(batch, heads, _MOST_SPLITS, _QUERY_ROWS, device=device)

    def of_batch(self, count: int) -> SpeculationWorkspace:
        """The part that a smaller batch needs, in the same memory."""
        part = copy.copy(self)
        for name in ("ranks", "wanted", "chosen", "best"):
            setattr(part, name, getattr(self, name)[:count])
        return part


class TokenLists:
    """Chosen tokens: blocks in the order of the row, ``pages`` and ``masks`` ``[B, H, most]``, int32.

    Of a list the first ``counts`` ``[B, H]`` are there. Token i of a list, in the order of the row, is staged token i
    of its (row, KV head); ``offsets`` ``[B, H, most]`` has the first of each block. ``tokens`` ``[B]``: how many a KV
    head has; ``places`` ``[B]``: of the step's own token, the last one, for ``place_tokens``.
    """

    def __init__(self, batch: int, heads: int, most: int, device: torch.device | str = "cuda") -> None:
        lists = torch.zeros(3, batch, heads, most, dtype=torch.int32, device=device)
        self.pages, self.masks, self.offsets = lists.unbind(0)
        self.counts = torch.zeros(batch, heads, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.places = torch.full((batch,), -1, dtype=torch.int32, device=device)

    def of_batch(self, count: int) -> TokenLists:
        """The part that a smaller batch needs, in the same memory."""
        part = copy.copy(self)
        for name in ("pages", "masks", "offsets", "counts", "tokens", "places"):
            setattr(part, name, getattr(self, name)[:count])
        return part


def speculate(
    query: torch.Tensor,
    partial: PartialKeyCodes,
    step: Step,
    scale: float,
    alpha: float,
    workspace: SpeculationWorkspace,
) -> None:
    """``selection.below_best`` of the query ``[B, H * G, D]`` as ranks, and how many items each KV head wants.

    By blocks: ``selection.best_of_blocks`` of it. Tokens of pages that are not in the pool are below all others.
    """
    batch, query_heads, dim = query.shape
    heads, group = partial.heads, query_heads // partial.heads
    items = step.max_blocks * (1 if workspace.by_block else BLOCK_TOKENS)
    if query.dtype != partial.dtype or dim != partial.dim:
        raise ValueError(f"queries {tuple(query.shape)} of {query.dtype} do not fit partial keys of {partial.dtype}")
    launch(
        "speculate",
        partial=partial.arguments(),
        step=step.arguments(),
        query=address("query", query, HALVES, (step.batch, heads * group, dim)),
        best=address("best", workspace.best, torch.float32, (batch, heads, _MOST_SPLITS, _QUERY_ROWS)),
        ranks=address("ranks", workspace.ranks, torch.int32, (batch, heads, items)),
        wanted=address("wanted", workspace.wanted, torch.int32, (batch, heads)),
        scale=scale,
        alpha=alpha,
        group=group,
        by_block=workspace.by_block,
        splits=min(_MOST_SPLITS, max(1, _CTAS // max(1, batch * heads))),
    )


def choose_tokens(
    step: Step,
    limit: int,
    workspace: SpeculationWorkspace,
    lists: TokenLists,
    staged_blocks: int,
    *,
    counted: torch.Tensor | None = None,
) -> None:
    """``selection.choose`` by what ``speculate`` found, as ``list_of_tokens`` or ``list_of_blocks`` have it.

    ``limit``: items of a KV head, with the last one. ``staged_blocks`` of an entry hold as many. ``counted`` (one
    int64): chosen tokens of all KV heads are added.
    """
    batch, heads, most = lists.pages.shape
    items, of_lists = workspace.ranks.shape[2], (step.batch, heads, most)
    tokens = limit * BLOCK_TOKENS if workspace.by_block else limit
    if most < min(limit, step.max_blocks) or staged_blocks * BLOCK_TOKENS < tokens or limit < 1:
        raise ValueError(
            f"lists of {most} and {staged_blocks} staged blocks do not hold {limit} items, {tokens} tokens"
        )
    launch(
        "choose_tokens",
        step=step.arguments(),
        ranks=address("ranks", workspace.ranks, torch.int32, (batch, heads, items)),
        wanted=address("wanted", workspace.wanted, torch.int32, (batch, heads)),
        chosen=address("chosen", workspace.chosen, torch.int32, (batch, heads, step.max_blocks)),
        pages=address("pages", lists.pages, torch.int32, of_lists),
        masks=address("masks", lists.masks, torch.int32, of_lists),
        offsets=address("offsets", lists.offsets, torch.int32, of_lists),
        counts=address("counts", lists.counts, torch.int32, (batch, heads)),
        tokens=address("tokens", lists.tokens, torch.int32, (batch,)),
        places=address("places", lists.places, torch.int32, (batch,)),
        counted=None if counted is None else address("counted", counted.view(-1), torch.int64, (1,)),
        kv_heads=heads,
        by_block=workspace.by_block,
        limit=limit,
        most_blocks=most,
        staged_blocks=staged_blocks,
    )


def gather_tokens(
    pool: HostPool,
    lists: TokenLists,
    staged_keys: torch.Tensor,
    staged_values: torch.Tensor,
    *,
    active_rows: torch.Tensor | None = None,
    refused: torch.Tensor | None = None,
    ctas: int = GATHER_CTAS,
) -> None:
    """Copy the listed tokens, but for the step's own ones, to staged keys and values ``[B * blocks, H, 32, D]``.

    Numbers are checked on the device. Blocks out of bounds are left out and added to ``refused`` (one int64).
    """
    (batch, heads, most), (pages, _, tokens, dim) = lists.pages.shape, pool.keys.shape
    staged_blocks = staged_keys.shape[0] // batch
    of_lists, of_staged = (batch, heads, most), (batch * staged_blocks, heads, BLOCK_TOKENS, dim)
    if tokens != BLOCK_TOKENS or pool.values.shape != pool.keys.shape:
        raise ValueError(f"the pool has keys {tuple(pool.keys.shape)} and values {tuple(pool.values.shape)}")
    launch(
        "gather_tokens",
        keys=pool.region.address_of("keys of the pool", pool.keys),
        values=pool.region.address_of("values of the pool", pool.values),
        staged_keys=address("staged keys", staged_keys, pool.keys.dtype, of_staged),
        staged_values=address("staged values", staged_values, pool.values.dtype, of_staged),
        pages=address("pages", lists.pages, torch.int32, of_lists),
        masks=address("masks", lists.masks, torch.int32, of_lists),
        offsets=address("offsets", lists.offsets, torch.int32, of_lists),
        counts=address("counts", lists.counts, torch.int32, (batch, heads)),
        active_rows=active_address(active_rows),
        refused=None if refused is None else address("refused", refused.view(-1), torch.int64, (1,)),
        batch=batch,
        kv_heads=heads,
        token_bytes=dim * pool.keys.itemsize,
        pool_pages=pages,
        most_blocks=most,
        staged_blocks=staged_blocks,
        ctas=ctas,
    )
