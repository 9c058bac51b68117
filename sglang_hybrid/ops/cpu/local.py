"""The CPU worker's computation in this process. The results are equal to the worker's, bit for bit."""

from __future__ import annotations

import ctypes

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cpu.dtypes import query_dtype
from sglang_hybrid.ops.cpu.library import checked, library
from sglang_hybrid.ops.cpu.lists import HostLists, HostWork
from sglang_hybrid.ops.cpu.structs import Geometry


class LocalAttention:
    """Computes block lists over a pool that this process has mapped. Threads exist only during a call."""

    def __init__(self, pool_address: int, geometry: Geometry, task_blocks: int, threads: int) -> None:
        self._library = library()
        self._pool = ctypes.c_void_p(pool_address)
        self._geometry = geometry
        self.query_dtype = query_dtype(geometry)  # dtype that queries of lists must have
        self._task_blocks = task_blocks
        self._threads = threads

    def attend(self, lists: HostWork, outcome: torch.Tensor | None = None) -> None:
        """Compute attention, or sums of values for ``HostSums``, and write ``lists.out`` and ``lists.lse``.

        With ``outcome``, only rows whose outcome is not ``SERVED`` are computed.
        """
        rows = ctypes.c_void_p(outcome.data_ptr()) if outcome is not None else None
        checked(
            self._library.sh_attend_local, self._pool, ctypes.byref(self._geometry), ctypes.byref(lists.struct),
            self._task_blocks, self._threads, rows, *lists.results,
        )  # fmt: skip

    def token_weights(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        ids: torch.Tensor,
        fill: torch.Tensor,
        scale: float,
        lse: torch.Tensor,
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute ``reference_weights.token_weights`` on the CPU: ``[rows, KV heads, group, n, 32]`` on query's device.

        ``keys`` must be one layer of the pool, otherwise ValueError is raised. Only the last block of a list may be
        partial.
        """
        g = self._geometry
        layer, beside = divmod(keys.data_ptr() - (self._pool.value or 0) - g.keys, g.layer_stride)
        if beside or not 0 <= layer < g.layers:
            raise ValueError("the keys are no layer of this pool")
        lists = HostLists(query, ids, fill, layer, scale, self.query_dtype, masks)
        total = lse.to("cpu", torch.float32).contiguous()
        weights = torch.empty(lists.rows, g.kv_heads, g.group, ids.shape[2], BLOCK_TOKENS)
        checked(
            self._library.sh_token_weights, self._pool, ctypes.byref(g), ctypes.byref(lists.struct), self._threads,
            ctypes.c_void_p(total.data_ptr()), ctypes.c_void_p(weights.data_ptr()),
        )  # fmt: skip
        return weights.to(query.device)
