"""Moving averages of attention weights (MAW) of the tokens in slots, and the salient tokens before them: policy hgca.

A step of one layer::

    contextual_sets -> post                   what left the window, and lists of salient tokens
    append -> attend_slots -> move_averages   the window
    wait -> merge

The slots of a (row, KV head) are a ring: block p of the row is in slot ``p % S``, and the newest S blocks are in::

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
    """Pages and masks ``[B, H, most]`` of which the first ``counts`` ``[B, H]`` are there, int32. All full blocks."""

    def __init__(self, batch: int, heads: int, most: int, device: torch.device | str = "cuda") -> None:
        self.pages, self.masks = torch.zeros(2, batch, heads, most, dtype=torch.int32, device=device).unbind(0)
        self.counts = torch.zeros(batch, heads, dtype=torch.int32, device=device)

    def of_batch(self, count: int) -> MaskedLists:
        """The part that a smaller batch needs, in the same memory."""
        part = copy.copy(self)
        part.pages, part.masks, part.counts = self.pages[:count], self.masks[:count], self.counts[:count]
        return part


@dataclass(frozen=True)
class LayerWindow:
    """One layer's window of all rows, and what is salient before it."""

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
    """Bring windows and contextual sets to the beginning of a step, whose tokens are not in the cache yet.

    A row that opens a block: its oldest block leaves the window; the block's mask has the tokens whose MAW is above
    ``beta / (32 * S)`` (``reference_salience.salient_masks``). A row that ``begins`` ``[B]`` (None: all of them): the
    window is loaded from the pool; the query's weights over the window are the averages of its tokens, and those of
    its weights over all tokens before the window that are above ``beta / tokens`` make the masks. ``beta`` 0 takes
    all. ``lists`` get the blocks that have salient tokens. ``counted`` (one int64): listed tokens are added.
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
    """``reference_salience.move_averages`` of all tokens in slots, by ``reference_weights.token_weights``.

    query ``[B, H * G, D]`` and its ``lse`` ``[B, H * G]`` over the slots, as ``attend_slots`` gives it; lengths
    ``[rows]`` and row_of ``[B]`` as there.
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
