"""One layer's block lists as the library takes them, with the tensors that they point into."""

from __future__ import annotations

import ctypes

import torch

from sglang_hybrid.ops.cpu.structs import Lists


class HostWork:
    """``sh_lists`` over contiguous tensors in host memory, and room for the result."""

    struct: Lists
    _ids: torch.Tensor  # [rows, KV heads, listed]

    def __init__(self, rows: int, heads: int, dim: int) -> None:
        self.rows = rows
        self.out = torch.zeros(rows, heads, dim, dtype=torch.float32)  # stays 0 where a list is empty
        self.lse = torch.empty(rows, heads, dtype=torch.float32)
        self.outcome = torch.zeros(rows, dtype=torch.uint8)  # sh_outcome of each row

    @property
    def blocks(self) -> torch.Tensor:
        """``[rows]``: how many blocks the lists of each row have."""
        return (self._ids >= 0).sum(dim=(1, 2))

    @property
    def results(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return ctypes.c_void_p(self.out.data_ptr()), ctypes.c_void_p(self.lse.data_ptr())


class HostLists(HostWork):
    """Blocks that are attended."""

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
        """query ``[rows, query heads, head_dim]``, ids and fill ``[rows, KV heads, listed]``, ``dtype`` for queries.

        ``masks``, like ids: bit t says that token t of the block counts.
        """
        self._query = query.to("cpu", dtype).contiguous()
        self._ids = ids.to("cpu", torch.int64).contiguous()
        self._fill = fill.to("cpu", torch.int64).contiguous()
        self._masks = None if masks is None else masks.to("cpu", torch.int32).contiguous()
        super().__init__(*query.shape)
        self.struct = Lists(
            self._query.data_ptr(), self._ids.data_ptr(), self._fill.data_ptr(),
            None if self._masks is None else self._masks.data_ptr(), None, self.rows, ids.shape[2], layer, scale,
        )  # fmt: skip


class HostSums(HostWork):
    """Blocks whose values are summed by weights. ``lse`` gets 0 where a list has blocks, ``-inf`` where it is empty."""

    def __init__(self, weights: torch.Tensor, ids: torch.Tensor, layer: int, dim: int) -> None:
        """weights ``[rows, KV heads, group, listed, 32]``, ids ``[rows, KV heads, listed]``, ``dim`` of a value."""
        self._weights = weights.to("cpu", torch.float32).contiguous()
        self._ids = ids.to("cpu", torch.int64).contiguous()
        rows, heads, group, listed, _ = weights.shape
        super().__init__(rows, heads * group, dim)
        self.struct = Lists(None, self._ids.data_ptr(), None, None, self._weights.data_ptr(), rows, listed, layer, 1.0)
