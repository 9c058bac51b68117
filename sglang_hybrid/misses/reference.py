"""Misses served in plain torch, in this process: for shapes that the kernels do not have, and for tests."""

from __future__ import annotations

import torch

from sglang_hybrid.misses.base import MissServer, Posted, Ready
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.base import BlockList, LayerCache


class ReferenceMisses(MissServer):
    def post(self, query: torch.Tensor, cache: LayerCache, blocks: BlockList, scale: float, step: int) -> Posted:
        return Ready(reference.attend_blocks(query, cache.keys, cache.values, blocks.ids, blocks.fill, scale))
