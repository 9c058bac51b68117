"""Policy ``full`` on a GPU: every row attends to its whole context.

While all running rows fit in device memory, whole rows are held there. Otherwise no row is held: every layer stores the
new tokens in the host pool and reads all blocks of all rows from the host pool, over PCIe. This is exact and slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from sglang_hybrid.engines.cuda.layers import DeviceLayer, DeviceShape
from sglang_hybrid.engines.cuda.program import ProgramContext, StepProgram
from sglang_hybrid.engines.cuda.slots import BlockMemory
from sglang_hybrid.memory.device_capacity import whole_request_blocks
from sglang_hybrid.ops.cuda.missed import attend_pool


class DeviceFull(StepProgram):
    """Step program without selection and recalls: two kernels per layer on the main lane, no buffers between them."""

    def __init__(self, layers: Sequence[DeviceLayer], shape: DeviceShape, blocks_per_row: int) -> None:
        """Allocate device memory for ``blocks_per_row`` blocks per row, shared by all rows; 0: rows are never held."""
        first = layers[0]
        memory = BlockMemory(
            len(layers), shape.rows, shape.heads, blocks_per_row, shape.dim, first.pool.keys.dtype,
            first.digests.digests.device,
        )  # fmt: skip
        super().__init__(layers, shape, memory)

    @classmethod
    def create(cls, context: ProgramContext) -> Self:
        blocks = whole_request_blocks(context.config) if context.holds_whole_requests else 0
        return cls(context.layers, context.shape, blocks)

    @property
    def without_whole_requests(self) -> str:
        return "every step reads all of their blocks from host memory"

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if self.is_dense:
            return self.dense.decode(layer, query, keys, values, scale)
        self.dense.store(layer, keys, values)  # writes to the pool only, because no row is held
        count = query.shape[0]
        return attend_pool(
            query, self._layers[layer].pool, self.step.of_batch(count), scale,
            workspace=self._attention.attending(count), out=self._attention.out(count),
        )  # fmt: skip
