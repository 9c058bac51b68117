"""Rows that are in device memory as a whole: which page holds which block, and attention over all of them.

    keys, values  [pages, H, 32, D]       of a layer; a page has the same number in all layers
    table         [rows, max_blocks]      page of each block of a row, and how many blocks of it have one

``hold_rows`` runs before every step and says what has to be loaded from the host pool; ``append`` writes the step's
tokens to the tails' pages; ``attend_pages`` is exact attention. When rows are held no longer, ``move_to_slots`` makes
slots of pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.attention import AttendWorkspace
from sglang_hybrid.ops.cuda.digests import DenseTable
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.selection import RecallPlan
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.tensors import HALVES, address, dtype_code, pools_for

MOVE_CTAS = 1024  # both sides are in device memory: enough to fill every processor


@dataclass(frozen=True)
class StagedBlocks:
    """Device memory for blocks on their way, ``[blocks, 32, D]`` each."""

    keys: torch.Tensor
    values: torch.Tensor


class PageAllocator:
    """Free pages, and what a step has to load: state between launches of ``hold_rows``."""

    def __init__(self, table: DenseTable, heads: int) -> None:
        device, pages = table.pages.device, table.device_pages
        self.table, self.heads = table, heads

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._free_pages, self._free_count = zeros(pages), zeros(1)
        self.load_pages, self.load_destinations = zeros(pages * heads), zeros(pages * heads)
        self.load_count = zeros(1)
        self._renewed = zeros(table.pages.shape[0])
        self._all = torch.arange(pages, dtype=torch.int32, device=device)
        self.forget_all()

    def forget_all(self) -> None:
        """Nothing is held."""
        self.table.held.zero_()
        self._renewed.zero_()
        self._free_pages.copy_(self._all)
        self._free_count.fill_(self._all.numel())

    def reset_rows(self, rows: torch.Tensor) -> None:
        """These rows ``[n]`` int64 are other requests from now on."""
        self._renewed.index_fill_(0, rows, 1)

    def hold_rows(self, step: Step, refused: torch.Tensor | None = None) -> None:
        """The rows of the step have pages for all their blocks, all other rows none.

        ``load_pages`` and ``load_destinations``, the first ``load_count`` of them, are what the host pool has of pages
        that are new: for ``gather_blocks`` into slots ``[pages, H, 1, 32, D]``. Rows that find no pages are added to
        ``refused`` (one int64).
        """
        rows, capacity = self.table.pages.shape[0], self.load_pages.numel()
        launch(
            "hold_rows",
            table=self.table.arguments(),
            step=step.arguments(),
            renewed=address("renewed", self._renewed, torch.int32, (rows,)),
            free_pages=address("free_pages", self._free_pages, torch.int32, (self.table.device_pages,)),
            free_count=address("free_count", self._free_count, torch.int32, (1,)),
            load_pages=address("load_pages", self.load_pages, torch.int32, (capacity,)),
            load_destinations=address("load_destinations", self.load_destinations, torch.int32, (capacity,)),
            load_count=address("load_count", self.load_count, torch.int32, (1,)),
            refused=None if refused is None else address("refused", refused.view(-1), torch.int64, (1,)),
            capacity=capacity,
            kv_heads=self.heads,
        )

    def move_to_slots(
        self,
        plan: RecallPlan,
        keys: torch.Tensor,
        values: torch.Tensor,
        staged: StagedBlocks,
        *,
        ctas: int = MOVE_CTAS,
    ) -> None:
        """Blocks of a plan that are held, to their slots: keys and values ``[rows, H, S, 32, D]`` of a layer.

        Slots are the memory of the pages: from now on a layer's pages hold nothing. All blocks are copied to ``staged``
        before the first slot is written. Those that were have page -1 in the plan. What is not held, and what finds no
        room there, keeps its page, for ``gather_blocks``.
        """
        rows, heads, slots = keys.shape[:3]
        block = tuple(keys.shape[3:])
        if heads != self.heads or rows * slots != self.table.device_pages or rows != self.table.pages.shape[0]:
            raise ValueError(
                f"slots {tuple(keys.shape)} are not the memory of {self.table.device_pages} pages of {self.heads} heads"
            )
        of_staging = (staged.keys.shape[0], *block)
        for to_slots in (False, True):
            launch(
                "move_held",
                plan=plan.arguments(),
                table=self.table.arguments(),
                renewed=address("renewed", self._renewed, torch.int32, (rows,)),
                keys=address("keys", keys, HALVES, (rows, heads, slots, *block)),
                values=address("values", values, keys.dtype, (rows, heads, slots, *block)),
                staged_keys=address("staged keys", staged.keys, keys.dtype, of_staging),
                staged_values=address("staged values", staged.values, keys.dtype, of_staging),
                staged_blocks=staged.keys.shape[0],
                kv_heads=heads,
                slots=slots,
                block_bytes=keys[0, 0, 0].numel() * keys.itemsize,
                ctas=ctas,
                to_slots=to_slots,
            )


def attend_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: DenseTable,
    step: Step,
    scale: float,
    *,
    workspace: AttendWorkspace,
    out: torch.Tensor,
    overlaps: bool = False,
) -> torch.Tensor:
    """Attention over all tokens of each row: query and ``out`` ``[B, H * G, D]``.

    keys and values ``[pages, H, 32, D]``, of the query's dtype or of FP8. Blocks that have no page are left out. With
    ``overlaps`` this is launched right after an ``append`` that overlaps, and begins with blocks that are full before
    that is done.
    """
    batch, query_heads, dim = query.shape
    pages, heads = keys.shape[:2]
    group = query_heads // heads
    if workspace.shape != (batch, heads, group, dim):
        raise ValueError(f"the workspace is for {workspace.shape}, not for {(batch, heads, group, dim)}")
    if pages != table.device_pages:
        raise ValueError(f"the table is for {table.device_pages} pages, there are {pages}")
    of_blocks = (pages, heads, BLOCK_TOKENS, dim)
    launch(
        "attend_pages",
        query=address("query", query, HALVES, (batch, heads * group, dim)),
        keys=address("keys", keys, pools_for(query.dtype), of_blocks),
        values=address("values", values, keys.dtype, of_blocks),
        table=table.arguments(),
        step=step.arguments(),
        out=address("out", out, query.dtype, (batch, query_heads, dim)),
        partial_out=workspace.out.data_ptr(),
        partial_lse=workspace.lse.data_ptr(),
        arrived=workspace.arrived.data_ptr(),
        scale=scale,
        kv_heads=heads,
        group=group,
        head_dim=dim,
        dtype=dtype_code(keys.dtype, query.dtype),
        units=workspace.units,
        overlaps=overlaps,
    )
    return out
