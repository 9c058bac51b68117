"""Misses served in this process by the native kernels: what ``worker=none`` means."""

from __future__ import annotations

import torch

from sglang_hybrid.misses.base import MissServer, Posted, Ready
from sglang_hybrid.native.lists import HostLists
from sglang_hybrid.native.local import LocalAttention
from sglang_hybrid.policies.base import BlockList, LayerCache


class NativeMisses(MissServer):
    def __init__(self, local: LocalAttention) -> None:
        self._local = local

    def post(self, query: torch.Tensor, cache: LayerCache, blocks: BlockList, scale: float, step: int) -> Posted:
        lists = HostLists(query, blocks.ids, blocks.fill, cache.layer, scale, cache.keys.dtype)
        self._local.attend(lists)
        return Ready((lists.out.to(query.device), lists.lse.to(query.device)))
