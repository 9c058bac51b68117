"""Handover of rows from steps that hold whole rows to steps with slots: last queries, and memory to move blocks.

While whole rows are held, every layer keeps the query of each row's last step (``append`` copies the query, so no
launch is added). When rows are no longer held, these queries select the blocks that get slots; the blocks are on the
device already. Pages and slots are the same memory, so blocks are moved through the staging buffers of prefill, which
are idle between two prefill passes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_hybrid.engines.cuda.layers import DeviceShape
from sglang_hybrid.ops.cuda.digests import LastQueries
from sglang_hybrid.ops.cuda.whole_requests import StagedBlocks


class Handover:
    def __init__(
        self,
        layers: int,
        shape: DeviceShape,
        dtype: torch.dtype,
        device: torch.device | str,
        borrow: Callable[[], StagedBlocks | None],
    ) -> None:
        """``borrow`` lends memory to the main stream until the next prefill pass; None if a pass is under way."""
        of_rows = (shape.rows, shape.heads * shape.group, shape.dim)
        # length of each row at its last kept query; 0: no query is kept
        self.lengths = torch.zeros(shape.rows, dtype=torch.int32, device=device)
        self._kept = [
            LastQueries(torch.zeros(of_rows, dtype=dtype, device=device), self.lengths) for _ in range(layers)
        ]
        self._scales = [0.0] * layers  # of the attention logits
        self._goes_on = torch.zeros(shape.max_batch, dtype=torch.int32, device=device)
        self.borrow = borrow

    def keeps(self, layer: int, scale: float) -> LastQueries:
        """Return the buffer to which a step that is launched or recorded copies the layer's queries. Note ``scale``."""
        self._scales[layer] = scale
        return self._kept[layer]

    def query(self, layer: int) -> tuple[torch.Tensor, float]:
        """Return the layer's last queries ``[rows, query heads, D]``, and the scale of their logits."""
        return self._kept[layer].queries, self._scales[layer]

    def goes_on(self, count: int) -> torch.Tensor:
        """Return ``[count]`` of the step in which rows stop being held: 1 for rows whose last query is kept."""
        return self._goes_on[:count]

    def reset_rows(self, rows: torch.Tensor) -> None:
        """Forget the last queries of ``rows`` ``[n]`` int64: their requests changed."""
        self.lengths.index_fill_(0, rows, 0)
