"""One layer's block lists in the form that the library takes, with the tensors that the lists point into."""

from __future__ import annotations

import ctypes

import torch

from sglang_hybrid.ops.cpu.structs import Lists


class HostWork:
    """A struct ``sh_lists`` over contiguous tensors in host memory, and tensors for the result."""

    struct: Lists
    _ids: torch.Tensor  # [rows, KV heads, listed]

    def __init__(self, rows: int, heads: int, dim: int) -> None:
        self.rows = rows
        self.out = torch.zeros(rows, heads, dim, dtype=torch.float32)  # the library leaves the 0 of empty lists
        self.lse = torch.empty(rows, heads, dtype=torch.float32)
        self.outcome = torch.zeros(rows, dtype=torch.uint8)  # sh_outcome of each row; 0, late, at first

    @property
    def blocks(self) -> torch.Tensor:
        """Return the number of blocks in all lists of each row: ``[rows]``."""
        return (self._ids >= 0).sum(dim=(1, 2))

    @property
    def results(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return ctypes.c_void_p(self.out.data_ptr()), ctypes.c_void_p(self.lse.data_ptr())


class HostLists(HostWork):
    """Lists of blocks to attend to."""

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
        """Copy the arguments to host memory as far as necessary; queries are converted to ``dtype``.

        query ``[rows, query heads, head_dim]``; ids, fill and ``masks`` ``[rows, KV heads, listed]``. Bit t of a mask
        means that token t of the block counts.
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
    """Lists of blocks whose values are summed by weights. ``lse`` becomes 0, or ``-inf`` where a list is empty."""

    def __init__(self, weights: torch.Tensor, ids: torch.Tensor, layer: int, dim: int) -> None:
        """Take weights ``[rows, KV heads, group, listed, 32]``, ids ``[rows, KV heads, listed]``, values' dim."""
        self._weights = weights.to("cpu", torch.float32).contiguous()
        self._ids = ids.to("cpu", torch.int64).contiguous()
        rows, heads, group, listed, _ = weights.shape
        super().__init__(rows, heads * group, dim)
        self.struct = Lists(None, self._ids.data_ptr(), None, None, self._weights.data_ptr(), rows, listed, layer, 1.0)
