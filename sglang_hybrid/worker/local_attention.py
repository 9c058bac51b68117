"""Server of misses that computes in this process with the native kernels, for ``worker=none``."""

from __future__ import annotations

import torch

from sglang_hybrid.core import BlockList, LayerCache
from sglang_hybrid.metrics.readings import ServedBlocks
from sglang_hybrid.ops.cpu.lists import HostLists, HostSums
from sglang_hybrid.ops.cpu.local import LocalAttention
from sglang_hybrid.worker.miss_server import MissServer, PendingAttention, PendingSum, Ready, ReadySum


class LocalMisses(MissServer):
    def __init__(self, local: LocalAttention) -> None:
        self._local = local
        self.served = ServedBlocks("process")

    def post(
        self, query: torch.Tensor, cache: LayerCache, blocks: BlockList, scale: float, step: int
    ) -> PendingAttention:
        dtype = self._local.query_dtype
        lists = HostLists(query, blocks.ids, blocks.fill, cache.layer, scale, dtype, blocks.masks)
        self._local.attend(lists)
        self.served.add("process", int(lists.blocks.sum()))
        return Ready((lists.out.to(query.device), lists.lse.to(query.device)))

    def post_sum(self, weights: torch.Tensor, cache: LayerCache, ids: torch.Tensor, step: int) -> PendingSum:
        sums = HostSums(weights, ids, cache.layer, cache.values.shape[3])
        self._local.attend(sums)
        return ReadySum(sums.out.to(weights.device))
