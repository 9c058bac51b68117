"""Steps in which every running row is in device memory as a whole: exact attention, as fast as without a host pool.

The memory of resident blocks is used as pages then. The host pool is written as always, and so are digests: rows that
no longer fit go on in the way of their policy, with a ``Handover`` by what is on the device already.
"""

from __future__ import annotations

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
        """Shares ``memory`` and the buffers of ``step`` and ``attention`` with steps of the other kind.

        ``handover``: gets the queries of every step.
        """
        device = memory.keys[0].device
        self._memory, self._handover = memory, handover
        self._layers, self._step, self._attention, self._refused = list(layers), step, attention, refused
        rows, _, slots = memory.keys[0].shape[:3]
        self.pages = rows * slots  # none, where nothing is ever held
        self._keys, self._values = (
            [part.view(self.pages, shape.heads, BLOCK_TOKENS, shape.dim) for part in parts]
            for parts in (memory.keys, memory.values)
        )
        no_positions = torch.full((shape.rows, shape.heads, 1), NO_BLOCK, dtype=torch.int32, device=device)
        self._no_slots = SlotTable(no_positions, 0, 0)
        table = torch.full((shape.rows, shape.max_blocks), -1, dtype=torch.int32, device=device)
        held = torch.zeros(shape.rows, dtype=torch.int32, device=device)
        self._allocator = PageAllocator(DenseTable(table, held, self.pages), shape.heads)
        self._something_new = True  # rows that have not been loaded
        self._expected: list[int] = []  # lengths of the next step, if it has the same rows

    @property
    def block_bytes(self) -> int:
        """Of a block of a row in all layers and KV heads."""
        return len(self._layers) * 2 * self._keys[0].shape[1:].numel() * self._keys[0].itemsize

    def forget_all(self) -> None:
        """No row is held any more."""
        self._allocator.forget_all()
        self._something_new = True

    def reset_rows(self, rows: torch.Tensor) -> None:
        """These rows ``[n]`` int64 are other requests from now on."""
        self._allocator.reset_rows(rows)
        self._something_new = True

    def begin_step(self, count: int, lengths: Sequence[int]) -> None:
        """Before the layers, never recorded: rows that are new in this step are loaded. The step's rows are there.

        ``lengths`` of its real rows, on the host.
        """
        step, pages = self._step.of_batch(count), self._allocator
        # a row may join later than in the step after it began
        self._something_new |= list(lengths) != self._expected
        self._expected = [length + 1 for length in lengths]
        # rows that left give their pages back when others need them
        if self._something_new or any(length % BLOCK_TOKENS == 1 for length in lengths):
            pages.hold_rows(step, self._refused)
        if not self._something_new:  # a new tail has nothing to load
            return
        self._something_new = False
        for layer, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            gather_blocks(
                layer.pool.region, layer.pool.keys, layer.pool.values, pages.load_pages,
                keys.unsqueeze(2), values.unsqueeze(2),
                destinations=pages.load_destinations, count=pages.load_count, refused=self._refused,
            )  # fmt: skip

    def digest_tails(self, count: int) -> None:
        """Before rows go on with slots: what was put off while nobody looked. The step's rows are there."""
        step = self._step.of_batch(count)
        for number, layer in enumerate(self._layers):
            append(
                layer.digests, self._no_slots, step, None, None, self._keys[number], self._values[number], layer.pool,
                dense=self._allocator.table, refused=self._refused,
            )  # fmt: skip

    def move_to_slots(self, layer: int, plan: RecallPlan, staged: StagedBlocks) -> None:
        """Blocks of a plan that are held, to their slots; the others keep their page in the plan. Then pages are void.

        Forget them when all layers are through.
        """
        self._allocator.move_to_slots(plan, self._memory.keys[layer], self._memory.values[layer], staged)

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

        ``query`` and ``kept`` as for ``append``.
        """
        of_layer, step = self._layers[layer], self._step.of_batch(keys.shape[0])
        if of_layer.codes is not None:
            of_layer.codes.encode_step(step, keys)  # in front: what overlaps with `append` comes right behind it
        append(
            of_layer.digests, self._no_slots, step, keys, values, self._keys[layer], self._values[layer],
            of_layer.pool, dense=self._allocator.table, query=query, kept=kept, overlaps=overlaps,
            refused=self._refused,
        )  # fmt: skip

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One token of each row, as ``StepProgram.decode``: attention over the whole row."""
        count = query.shape[0]
        kept = self._handover.keeps(layer, scale) if self._handover else None
        self.store(layer, keys, values, query=query if kept else None, kept=kept, overlaps=True)
        return attend_pages(
            query, self._keys[layer], self._values[layer], self._allocator.table, self._step.of_batch(count), scale,
            workspace=self._attention.attending(count), out=self._attention.out(count), overlaps=True,
        )  # fmt: skip
