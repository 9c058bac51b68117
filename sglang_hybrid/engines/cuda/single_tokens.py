"""Rows of a prefill pass that bring one token each: decode attention over their staged pages.

As a row's first decode step does. FlashInfer would plan each group of rows on the host and keep memory for its plan.
"""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.engines.cuda.row_groups import RowGroup
from sglang_hybrid.ops.cuda.attention import AttendWorkspace
from sglang_hybrid.ops.cuda.digests import DenseTable, Step
from sglang_hybrid.ops.cuda.whole_requests import attend_pages


def brings_single_tokens(group: RowGroup) -> bool:
    return len(group.places) == len(group.last_page_tokens)


class SingleTokenAttention:
    """Of one group. ``run`` is called as FlashInfer's wrapper is."""

    def __init__(self, group: RowGroup, staging_pages: int, scale: float, workspace: AttendWorkspace) -> None:
        """``workspace``: for as many rows as the group has; groups that follow each other may share it."""
        blocks = group.page_starts.diff()
        rows, longest = len(blocks), int(blocks.max())
        # [rows, longest] slots and, behind them, lengths, blocks and numbers of rows: one copy
        numbers = torch.full((rows, longest + 3), -1, dtype=torch.int32)
        for row, slots in enumerate(group.page_slots.split(blocks.tolist())):
            numbers[row, : len(slots)] = slots
        lengths = (blocks - 1) * BLOCK_TOKENS + group.last_page_tokens
        numbers[:, longest:] = torch.stack((lengths, blocks, torch.arange(rows)), dim=1)
        numbers = numbers.pin_memory().to(workspace.out.device, non_blocking=True)
        slots, (lengths, held, row_of) = numbers[:, :longest].contiguous(), numbers[:, longest:].t().contiguous()
        self._table, self._step = DenseTable(slots, held, staging_pages), Step(slots, lengths, row_of)
        self._scale, self._workspace = scale, workspace

    def run(self, query: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        attend_pages(
            query.contiguous(), *pages, self._table, self._step, self._scale, workspace=self._workspace, out=out
        )
