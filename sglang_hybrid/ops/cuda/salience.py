"""Policy hgca on the GPU: moving averages of attention weights (MAW) of tokens in slots, and salient older tokens.

The newest blocks of a row are in slots: the window. A step of one layer::

    contextual_sets -> post                   masks of blocks that left the window, lists of salient tokens
    append -> attend_slots -> move_averages   attention over the window
    wait -> merge

The slots of a (row, KV head) are a ring: block p of the row is in slot ``p % S``, and slots hold the newest S blocks::

    keys, values  [rows, H, S, 32, D]
    positions     [rows, H, S]             block of the row's sequence, -1: none
    maw           [rows, H, S, 32]         float32
    masks         [rows, H, max_blocks]    int32, bit t: token t of a block before the window is salient
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.digests import HostPool, SlotTable
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.tensors import HALVES, active_address, address, dtype_code


class MaskedLists:
    """Lists of full blocks: pages and masks ``[B, H, most]`` int32, the first ``counts`` ``[B, H]`` of them valid."""

    def __init__(self, batch: int, heads: int, most: int, device: torch.device | str = "cuda") -> None:
        self.pages, self.masks = torch.zeros(2, batch, heads, most, dtype=torch.int32, device=device).unbind(0)
        self.counts = torch.zeros(batch, heads, dtype=torch.int32, device=device)

    def of_batch(self, count: int) -> MaskedLists:
        """Return the part that a smaller batch needs, in the same memory."""
        part = copy.copy(self)
        part.pages, part.masks, part.counts = self.pages[:count], self.masks[:count], self.counts[:count]
        return part


@dataclass(frozen=True)
class LayerWindow:
    """Windows of all rows in one layer, and masks of the salient tokens before the windows."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    maw: torch.Tensor
    masks: torch.Tensor

    def table(self) -> SlotTable:
        return SlotTable(self.positions, sink=0, recent=self.positions.shape[2] - 1)


def contextual_sets(
    query: torch.Tensor,
    pool: HostPool,
    step: Step,
    window: LayerWindow,
    scale: float,
    beta: float,
    *,
    begins: torch.Tensor | None = None,
    lists: MaskedLists | None = None,
    counted: torch.Tensor | None = None,
    refused: torch.Tensor | None = None,
) -> None:
    """Update windows and contextual sets at the beginning of a step, before the step's tokens are in the cache.

    If a row opens a block, the row's oldest block leaves the window. The mask of the block that leaves gets the tokens
    whose MAW is above ``beta / (32 * S)`` (``reference_salience.salient_masks``).

    If a row ``begins`` ``[B]`` (None: all rows do), its window is loaded from the pool. The query's attention weights
    over the window become the averages of its tokens. Tokens before the window are salient if the query's weight, over
    all these tokens, is above ``beta / tokens``. With ``beta`` 0 all tokens are salient.

    ``lists`` get the blocks that have salient tokens. The number of listed tokens is added to ``counted`` (one int64),
    and the number of window blocks that are not in the pool to ``refused`` (one int64).
    """
    batch, query_heads, dim = query.shape
    rows, heads, slots = window.positions.shape
    of_slots, dtype = (rows, heads, slots, BLOCK_TOKENS, dim), pool.keys.dtype
    most = 0 if lists is None else lists.pages.shape[2]
    of_lists = (batch, heads, most)
    launch(
        "contextual_sets",
        query=address("query", query, HALVES, (step.batch, query_heads, dim)),
        pool_keys=pool.region.address_of("keys of the pool", pool.keys),
        pool_values=pool.region.address_of("values of the pool", pool.values),
        key_slots=address("keys of slots", window.keys, dtype, of_slots),
        value_slots=address("values of slots", window.values, dtype, of_slots),
        table=window.table().arguments(heads),
        step=step.arguments(),
        begins=address("begins", begins, torch.int32, (batch,)),
        maw=address("maw", window.maw, torch.float32, (rows, heads, slots, BLOCK_TOKENS)),
        masks=address("masks", window.masks, torch.int32, (rows, heads, step.max_blocks)),
        pages=None if lists is None else address("pages", lists.pages, torch.int32, of_lists),
        list_masks=None if lists is None else address("masks of lists", lists.masks, torch.int32, of_lists),
        counts=None if lists is None else address("counts", lists.counts, torch.int32, of_lists[:2]),
        counted=None if counted is None else address("counted", counted.view(-1), torch.int64, (1,)),
        refused=None if refused is None else address("refused", refused.view(-1), torch.int64, (1,)),
        scale=scale,
        beta=beta,
        kv_heads=heads,
        group=query_heads // heads,
        head_dim=dim,
        dtype=dtype_code(dtype),
        pool_pages=pool.keys.shape[0],
        most_blocks=most,
    )


def move_averages(
    query: torch.Tensor,
    window: LayerWindow,
    lengths: torch.Tensor,
    row_of: torch.Tensor,
    scale: float,
    lse: torch.Tensor,
    alpha: float,
    *,
    active_rows: torch.Tensor | None = None,
) -> None:
    """Update MAW of all tokens in slots by ``reference_salience.move_averages`` of their attention weights.

    query ``[B, H * G, D]`` and its ``lse`` ``[B, H * G]`` over the slots, as ``attend_slots`` returns it; lengths
    ``[rows]`` and row_of ``[B]`` as for ``attend_slots``. Weights are ``reference_weights.token_weights``.
    """
    batch, query_heads, dim = query.shape
    rows, heads, slots = window.positions.shape
    launch(
        "move_averages",
        query=address("query", query, HALVES, (batch, query_heads, dim)),
        keys=address("keys of slots", window.keys, query.dtype, (rows, heads, slots, BLOCK_TOKENS, dim)),
        positions=address("positions of slots", window.positions, torch.int32, (rows, heads, slots)),
        row_of=address("row_of", row_of, torch.int32, (batch,)),
        lengths=address("lengths", lengths, torch.int32, (rows,)),
        active_rows=active_address(active_rows),
        lse=address("lse", lse, torch.float32, (batch, query_heads)),
        maw=address("maw", window.maw, torch.float32, (rows, heads, slots, BLOCK_TOKENS)),
        scale=scale,
        alpha=alpha,
        rows=rows,
        batch=batch,
        kv_heads=heads,
        group=query_heads // heads,
        head_dim=dim,
        dtype=dtype_code(query.dtype),
        slots=slots,
    )
