"""Server of misses in plain torch, in this process: for shapes that the kernels do not support, and for tests."""

from __future__ import annotations

import torch

from sglang_hybrid.core import BlockList, LayerCache
from sglang_hybrid.ops import reference
from sglang_hybrid.worker.miss_server import MissServer, PendingAttention, Ready


class TorchMisses(MissServer):
    def post(
        self, query: torch.Tensor, cache: LayerCache, blocks: BlockList, scale: float, step: int
    ) -> PendingAttention:
        self.served.add("process", int((blocks.ids != reference.NO_BLOCK).sum()))
        partial = reference.attend_blocks(
            query, cache.keys, cache.values, blocks.ids, blocks.fill, scale, masks=blocks.masks
        )
        return Ready(partial)
