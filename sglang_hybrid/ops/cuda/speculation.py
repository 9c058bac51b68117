"""Policy infinigen on the GPU: choose tokens by partial keys and copy them to device memory one layer ahead.

The kernels of a layer::

    speculate -> choose_tokens                 lists of blocks with masks of tokens
    gather_tokens                              pool -> staged tokens, without gaps
    place_tokens, attend_pages                 the step's own token, and attention over staged tokens

``policies/infinigen/selection.py`` specifies the selection. All KV heads of a row get the same number of tokens, so
``attend_pages`` can attend to the staged tokens as to the blocks of rows::

    staged keys, values  [B * blocks, H, 32, D]    entry b has blocks b * blocks and following
"""

from __future__ import annotations

import copy

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.digests import HostPool
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.partial_keys import PartialKeyCodes
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.tensors import HALVES, active_address, address

_MOST_SPLITS = 32  # sh_most_splits
_CTAS = 1024  # enough CTAs to fill a device
_GATHER_CTAS = 32  # fewer were not measured for tokens, as they were for blocks (copies.py)
_QUERY_ROWS = 16


class SpeculationWorkspace:
    """Intermediate results of one layer's kernels. ``ranks`` ``[B, H, items]`` are larger for better items."""

    def __init__(
        self, batch: int, heads: int, max_blocks: int, *, by_block: bool, device: torch.device | str = "cuda"
    ) -> None:
        """Allocate the workspace. ``by_block``: items are blocks; otherwise items are tokens."""

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
    """Lists of chosen tokens: blocks in the order of the row, ``pages`` and ``masks`` ``[B, H, most]``, int32.

    The first ``counts`` ``[B, H]`` blocks of a list are valid. Chosen token i of a list, in the order of the row, is
    staged token i of the (row, KV head). ``offsets`` ``[B, H, most]``: index of each block's first chosen token.
    ``tokens`` ``[B]``: number of chosen tokens of each KV head. ``places`` ``[B]``: destination for ``place_tokens`` of
    the step's own token, which is the last one of a list.
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
    """Write ``selection.below_best`` of the query ``[B, H * G, D]`` as ranks, and the number of items each head wants.

    If items are blocks, ranks are those of ``selection.best_of_blocks``. Tokens of pages that are not in the pool rank
    below all others.
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
    """Write the lists of ``selection.choose``, by the ranks and numbers that ``speculate`` has left in ``workspace``.

    Lists equal ``selection.list_of_tokens`` or ``list_of_blocks``. ``limit``: maximum number of items of a KV head,
    including the last item of the row. ``staged_blocks``: blocks of an entry, which must hold ``limit`` items. The
    number of chosen tokens of all KV heads is added to ``counted`` (one int64).
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
    ctas: int = _GATHER_CTAS,
) -> None:
    """Copy the listed tokens, except the step's own, to staged keys and values ``[B * blocks, H, 32, D]``.

    Page numbers and offsets are checked on the device. Blocks out of bounds are skipped, and their number is added to
    ``refused`` (one int64).
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
