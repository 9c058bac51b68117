"""What whole rows leave behind for steps with slots: their last queries, and memory for blocks that change places.

While rows are held as a whole, every layer keeps the query of each row's last step (``append`` copies it, so no launch
is added). When they are held no longer, these queries select the blocks that get slots, which are on the device
already. Pages and slots are the same memory, so blocks travel through the staging of prefill, idle between two passes.
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
        """``borrow`` returns memory that the main stream may use until somebody else needs it, if there is any now."""
        of_rows = (shape.rows, shape.heads * shape.group, shape.dim)
        # the length of each row at its last query; 0: it has none
        self.lengths = torch.zeros(shape.rows, dtype=torch.int32, device=device)
        self._kept = [
            LastQueries(torch.zeros(of_rows, dtype=dtype, device=device), self.lengths) for _ in range(layers)
        ]
        self._scales = [0.0] * layers  # of the attention logits
        self._goes_on = torch.zeros(shape.max_batch, dtype=torch.int32, device=device)
        self.borrow = borrow

    def keeps(self, layer: int, scale: float) -> LastQueries:
        """Return where a step that is launched, or recorded, leaves the layer's queries."""
        self._scales[layer] = scale
        return self._kept[layer]

    def query(self, layer: int) -> tuple[torch.Tensor, float]:
        """``[rows, query heads, D]``, and the scale of its logits."""
        return self._kept[layer].queries, self._scales[layer]

    def goes_on(self, count: int) -> torch.Tensor:
        """``[count]`` of the step in which rows are held no longer: 1 for those that have a query."""
        return self._goes_on[:count]

    def reset_rows(self, rows: torch.Tensor) -> None:
        """These rows ``[n]`` int64 are other requests from now on."""
        self.lengths.index_fill_(0, rows, 0)
