"""One layer's block lists as the library takes them, with the tensors that they point into."""

from __future__ import annotations

import ctypes

import torch

from sglang_hybrid.ops.cpu.structs import Lists


class HostLists:
    """``sh_lists`` over contiguous tensors in host memory, and room for the result."""

    def __init__(
        self,
        query: torch.Tensor,
        ids: torch.Tensor,
        fill: torch.Tensor,
        layer: int,
        scale: float,
        dtype: torch.dtype,
        masks: torch.Tensor | None = None,
    ) -> None:
        """query ``[rows, query heads, head_dim]``, ids and fill ``[rows, KV heads, listed]``, ``dtype`` of the pool.

        ``masks``, like ids: bit t says that token t of the block counts.
        """
        self._query = query.to("cpu", dtype).contiguous()
        self._ids = ids.to("cpu", torch.int64).contiguous()
        self._fill = fill.to("cpu", torch.int64).contiguous()
        self._masks = None if masks is None else masks.to("cpu", torch.int32).contiguous()
        rows, heads, dim = query.shape
        self.rows = rows
        self.out = torch.zeros(rows, heads, dim, dtype=torch.float32)  # stays 0 where a list is empty
        self.lse = torch.empty(rows, heads, dtype=torch.float32)
        self.outcome = torch.zeros(rows, dtype=torch.uint8)  # sh_outcome of each row
        self.struct = Lists(
            self._query.data_ptr(), self._ids.data_ptr(), self._fill.data_ptr(),
            None if self._masks is None else self._masks.data_ptr(), rows, ids.shape[2], layer, scale,
        )  # fmt: skip

    @property
    def results(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return ctypes.c_void_p(self.out.data_ptr()), ctypes.c_void_p(self.lse.data_ptr())
