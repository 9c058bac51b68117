"""The worker's computation in this process, with the same bits."""

from __future__ import annotations

import ctypes

import torch

from sglang_hybrid.ops.cpu.library import checked, library
from sglang_hybrid.ops.cpu.lists import HostLists
from sglang_hybrid.ops.cpu.structs import Geometry


class LocalAttention:
    """Computes block lists over a pool that is mapped here. Threads live only as long as a call."""

    def __init__(self, pool_address: int, geometry: Geometry, task_blocks: int, threads: int) -> None:
        self._library = library()
        self._pool = ctypes.c_void_p(pool_address)
        self._geometry = geometry
        self._task_blocks = task_blocks
        self._threads = threads

    def attend(self, lists: HostLists, outcome: torch.Tensor | None = None) -> None:
        """Fill ``lists.out`` and ``lists.lse``, of all rows or of those that ``outcome`` does not call served."""
        rows = ctypes.c_void_p(outcome.data_ptr()) if outcome is not None else None
        checked(
            self._library.sh_attend_local, self._pool, ctypes.byref(self._geometry), ctypes.byref(lists.struct),
            self._task_blocks, self._threads, rows, *lists.results,
        )  # fmt: skip
