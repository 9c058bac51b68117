"""Whole rows in device memory: allocation of device pages to blocks, and attention over all blocks of a row.

    keys, values  [pages, H, 32, D]       of a layer; a page has the same number in all layers
    table         [rows, max_blocks]      page of each block of a row, and number of its blocks that have one

``hold_rows`` runs before every step and lists the blocks to be loaded from the host pool. ``append`` writes the step's
tokens to the tails' pages. ``attend_pages`` computes exact attention. When whole rows are given up, ``move_to_slots``
moves blocks from pages to slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.attention import AttendWorkspace
from sglang_hybrid.ops.cuda.digests import DenseTable
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.selection import RecallPlan
from sglang_hybrid.ops.cuda.slot_codes import SlotCodes, code_addresses
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.tensors import HALVES, address, dtype_code, pools_for
from sglang_hybrid.ops.reference import FP8

MOVE_CTAS = 1024  # source and destination are in device memory, so use all multiprocessors


@dataclass(frozen=True)
class StagedBlocks:
    """Device memory that holds blocks while they are moved, keys and values ``[blocks, 32, D]``."""

    keys: torch.Tensor
    values: torch.Tensor


class PageAllocator:
    """State between launches of ``hold_rows``: the free device pages, and the blocks that a step must load."""

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
        """Free all pages: no row is held from now on."""
        self.table.held.zero_()
        self._renewed.zero_()
        self._free_pages.copy_(self._all)
        self._free_count.fill_(self._all.numel())

    def reset_rows(self, rows: torch.Tensor) -> None:
        """Mark ``rows`` ``[n]`` int64 as taken by new requests: the blocks that they hold are invalid."""
        self._renewed.index_fill_(0, rows, 1)

    def hold_rows(self, step: Step, refused: torch.Tensor | None = None) -> None:
        """Give the rows of the step pages for all their blocks, and free the pages of all other rows.

        The first ``load_count`` entries of ``load_pages`` and ``load_destinations`` list the blocks in the host pool
        that must be copied to new pages, by ``gather_blocks`` into slots ``[pages, H, 1, 32, D]``. The number of rows
        for which there are too few pages is added to ``refused`` (one int64).
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
        codes: SlotCodes | None = None,
        ctas: int = MOVE_CTAS,
    ) -> None:
        """Move the plan's blocks from device pages to their slots: keys and values ``[rows, H, S, 32, D]`` of a layer.

        Slots and pages are the same memory, so the layer's pages are invalid afterwards. All blocks are copied to
        ``staged`` before the first slot is written. A moved block gets page -1 in the plan. A block that no device page
        holds, or for which ``staged`` is too small, keeps its page in the plan: copy it by ``gather_blocks``. With
        ``codes`` the slots get codes, as for ``attend_slots``; pages keep numbers.
        """
        rows, heads, slots = keys.shape[:3]
        block, stored = tuple(keys.shape[3:]), staged.keys.dtype
        in_slots = stored if codes is None else torch.uint8
        pages = rows * slots * keys.itemsize // stored.itemsize
        if heads != self.heads or pages != self.table.device_pages or rows != self.table.pages.shape[0]:
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
                keys=address("keys", keys, in_slots, (rows, heads, slots, *block)),
                values=address("values", values, in_slots, (rows, heads, slots, *block)),
                staged_keys=address("staged keys", staged.keys, (*HALVES, FP8), of_staging),
                staged_values=address("staged values", staged.values, stored, of_staging),
                **code_addresses(codes, keys),
                slot_blocks=rows * heads * slots,
                staged_blocks=staged.keys.shape[0],
                kv_heads=heads,
                slots=slots,
                block_bytes=staged.keys[0].numel() * stored.itemsize,
                ctas=ctas,
                to_slots=to_slots,
                dtype=0 if codes is None else dtype_code(stored),
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
    """Attend to all tokens of each row and return ``out``: query and ``out`` ``[B, H * G, D]``.

    keys and values ``[pages, H, 32, D]``, of the query's dtype or FP8. Blocks that have no page are skipped. With
    ``overlaps`` the launch must directly follow an ``append`` with ``overlaps``: the kernel then attends to full blocks
    before ``append`` has finished.
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
