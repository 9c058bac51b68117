"""What the kernels of a decode step read: persistent, so that a recorded graph finds it where it was."""

from __future__ import annotations

import functools

import torch

from sglang_hybrid.cuda.digests import Step

# instead of a row's first length, before its first step
PREFILLED = -2  # its resident blocks were chosen when its prompt was computed
ARRIVED = -1  # nothing of it is resident


class StepBuffers:
    """Rows of the current step. Written before its layers, on the stream that runs them."""

    def __init__(self, rows: int, most: int, max_blocks: int, device: torch.device | str) -> None:
        """``rows`` that SGLang knows, at most ``most`` of them in a step, of at most ``max_blocks`` blocks."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._page_table, self._lengths, self._row_of = zeros(most, max_blocks), zeros(most), zeros(most)
        self._begins = zeros(most)
        self.active_rows = zeros(1)
        self.lengths_by_row = zeros(rows)
        self.first_lengths = torch.full((rows,), ARRIVED, dtype=torch.int32, device=device)

    def load(self, page_table: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, active: int) -> None:
        """page_table ``[n, blocks]``, lengths and rows ``[n]``, of which the first ``active`` are real."""
        count, blocks = page_table.shape
        rows = rows.to(torch.int64)
        self.active_rows.fill_(active)
        self._page_table[:count, :blocks].copy_(page_table)
        self._lengths[:count].copy_(lengths)
        self._row_of[:count].copy_(rows)
        # padding has row 0, which is nobody's
        self.lengths_by_row.index_copy_(0, rows, self._lengths[:count])
        first = self.first_lengths[rows]
        self._begins[:count].copy_(first == ARRIVED)
        self.first_lengths.index_copy_(0, rows, torch.where(first < 0, self._lengths[:count], first))

    def load_nothing(self) -> None:
        """A step without rows, for recording."""
        self.active_rows.fill_(0)

    @functools.cache  # noqa: B019 (lives as long as the backend)
    def of_batch(self, count: int) -> Step:
        return Step(self._page_table[:count], self._lengths[:count], self._row_of[:count], self.active_rows)

    def begins(self, count: int) -> torch.Tensor:
        """``[count]``: 1 for rows of which nothing is resident yet."""
        return self._begins[:count]

    def rows_begin(self, rows: torch.Tensor, state: int) -> None:
        self.first_lengths.index_fill_(0, rows, state)
