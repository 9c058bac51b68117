"""Steps in which every running row is in device memory as a whole: exact attention, as fast as without a host pool.

These steps use the memory of resident blocks as pages. The host pool and digests are written as in other steps. So rows
that no longer fit continue with slots, as their policy decides; with a ``Handover``, slots get blocks that are on the
device already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.engines.cuda.buffers import AttentionBuffers
from sglang_hybrid.engines.cuda.handover import Handover
from sglang_hybrid.engines.cuda.layers import DeviceLayer, DeviceShape
from sglang_hybrid.engines.cuda.slots import BlockMemory
from sglang_hybrid.engines.cuda.step import StepBuffers
from sglang_hybrid.ops.cuda.copies import gather_blocks
from sglang_hybrid.ops.cuda.digests import DenseTable, LastQueries, SlotTable, append
from sglang_hybrid.ops.cuda.selection import RecallPlan
from sglang_hybrid.ops.cuda.whole_requests import PageAllocator, StagedBlocks, attend_pages
from sglang_hybrid.ops.reference import NO_BLOCK


class WholeRequests:
    def __init__(
        self,
        layers: Sequence[DeviceLayer],
        shape: DeviceShape,
        memory: BlockMemory,
        step: StepBuffers,
        attention: AttentionBuffers,
        refused: torch.Tensor,
        handover: Handover | None = None,
    ) -> None:
        """Share ``memory`` and the buffers of ``step`` and ``attention`` with steps that do not hold whole rows.

        ``handover``: gets the queries of every step; None: queries are not kept.
        """
        device = memory.keys[0].device
        self._memory, self._handover = memory, handover
        self._layers, self._step, self._attention, self._refused = list(layers), step, attention, refused
        # Pages in device memory; 0: whole rows are never held. Pages are of the pool's dtype, even if slots keep codes.
        of_page, stored = (shape.heads, BLOCK_TOKENS, shape.dim), layers[0].pool.keys.dtype
        self.pages = memory.keys[0].nbytes // (math.prod(of_page) * stored.itemsize)
        self._keys, self._values = (
            [part.view(-1).view(stored)[: self.pages * math.prod(of_page)].view(self.pages, *of_page) for part in parts]
            for parts in (memory.keys, memory.values)
        )
        no_positions = torch.full((shape.rows, shape.heads, 1), NO_BLOCK, dtype=torch.int32, device=device)
        self._no_slots = SlotTable(no_positions, 0, 0)
        table = torch.full((shape.rows, shape.max_blocks), -1, dtype=torch.int32, device=device)
        held = torch.zeros(shape.rows, dtype=torch.int32, device=device)
        self._allocator = PageAllocator(DenseTable(table, held, self.pages), shape.heads)
        self._something_new = True  # whether some rows may not be loaded yet
        self._expected: list[int] = []  # lengths of the next step, if it has the same rows

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a page's keys and values, in all layers and KV heads."""
        return len(self._layers) * 2 * self._keys[0].shape[1:].numel() * self._keys[0].itemsize

    def forget_all(self) -> None:
        """Free the pages of all rows: no row is held any more."""
        self._allocator.forget_all()
        self._something_new = True

    def reset_rows(self, rows: torch.Tensor) -> None:
        """Forget what is held of ``rows`` ``[n]`` int64: their requests changed."""
        self._allocator.reset_rows(rows)
        self._something_new = True

    def begin_step(self, count: int, lengths: Sequence[int]) -> None:
        """Allocate pages, and load rows that are not held yet. Called before the layers of a step, never recorded.

        The step must be loaded. ``lengths``: tokens of its real rows, on the host.
        """
        step, pages = self._step.of_batch(count), self._allocator
        # a row may join the batch later than in the step after its reset
        self._something_new |= list(lengths) != self._expected
        self._expected = [length + 1 for length in lengths]
        # rows that are no longer in the batch lose their pages when other rows need new ones
        if self._something_new or any(length % BLOCK_TOKENS == 1 for length in lengths):
            pages.hold_rows(step, self._refused)
        if not self._something_new:  # a page for a new tail needs no load
            return
        self._something_new = False
        for layer, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            gather_blocks(
                layer.pool.region, layer.pool.keys, layer.pool.values, pages.load_pages,
                keys.unsqueeze(2), values.unsqueeze(2),
                destinations=pages.load_destinations, count=pages.load_count, refused=self._refused,
            )  # fmt: skip

    def digest_tails(self, count: int) -> None:
        """Digest the tails of the step's rows, before rows continue with slots. The step must be loaded.

        While whole rows are held nothing reads digests of tails, so ``append`` digests a block only when it is full.
        """
        step = self._step.of_batch(count)
        for number, layer in enumerate(self._layers):
            append(
                layer.digests, self._no_slots, step, None, None, self._keys[number], self._values[number], layer.pool,
                dense=self._allocator.table, refused=self._refused,
            )  # fmt: skip

    def move_to_slots(self, layer: int, plan: RecallPlan, staged: StagedBlocks) -> None:
        """Move the plan's blocks that are held to their slots. The layer's pages become void.

        The plan keeps the pages of blocks that are not held or do not fit in ``staged``. The caller must call
        ``forget_all`` when all layers are done.
        """
        memory = self._memory
        codes = memory.codes(layer, self._layers[layer].steps)
        self._allocator.move_to_slots(plan, memory.keys[layer], memory.values[layer], staged, codes=codes)

    def store(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        query: torch.Tensor | None = None,
        kept: LastQueries | None = None,
        overlaps: bool = False,
    ) -> None:
        """Write the step's tokens to the host pool, to the tails' pages of rows that are held, and to codes of keys.

        ``query``, ``kept`` and ``overlaps``: as for ``append``.
        """
        of_layer, step = self._layers[layer], self._step.of_batch(keys.shape[0])
        if of_layer.codes is not None:
            of_layer.codes.encode_step(step, keys)  # before `append`, because an overlapping launch follows `append`
        append(
            of_layer.digests, self._no_slots, step, keys, values, self._keys[layer], self._values[layer],
            of_layer.pool, dense=self._allocator.table, query=query, kept=kept, overlaps=overlaps,
            refused=self._refused,
        )  # fmt: skip

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store and attend one token of each row, as ``StepProgram.decode``. Attention is over the whole row."""
        count = query.shape[0]
        kept = self._handover.keeps(layer, scale) if self._handover else None
        self.store(layer, keys, values, query=query if kept else None, kept=kept, overlaps=True)
        return attend_pages(
            query, self._keys[layer], self._values[layer], self._allocator.table, self._step.of_batch(count), scale,
            workspace=self._attention.attending(count), out=self._attention.out(count), overlaps=True,
        )  # fmt: skip
