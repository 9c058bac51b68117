"""Rows of a decode step, in persistent buffers from which the kernels of a recorded CUDA graph read."""

from __future__ import annotations

import functools

import torch

from sglang_hybrid.engines.cuda.handover import Handover
from sglang_hybrid.engines.cuda.settings import WholeSteps
from sglang_hybrid.ops.cuda.step import Step, begin_step, let_rows_go

# values of ``first_lengths`` before a row's first step, see sh_first_length
PREFILLED = -2  # the row's resident blocks were selected when its prompt was computed
ARRIVED = -1  # the row has no resident blocks


class StepBuffers:
    """Rows of the current step, and the state of all rows. Written before the step's layers, on the same stream."""

    def __init__(
        self, rows: int, most: int, max_blocks: int, device: torch.device | str, *, whole: WholeSteps | None = None
    ) -> None:
        """Allocate buffers for ``rows`` rows, at most ``most`` of them in a step, of at most ``max_blocks`` blocks.

        ``whole``: the first steps of long rows; None: rows have no such steps.
        """

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._page_table, self._lengths, self._row_of = zeros(most, max_blocks), zeros(most), zeros(most)
        self._begins, self._whole, self._whole_steps = zeros(most), zeros(most), whole or WholeSteps(0, steps=0)
        self.active_rows = zeros(1)
        self.lengths = zeros(rows)
        self.first_lengths = torch.full((rows,), ARRIVED, dtype=torch.int32, device=device)

    def load(self, req_to_token: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, active: int) -> None:
        """Write the rows of a step. Of ``rows`` and ``lengths`` ``[n]`` the first ``active`` are real, others padding.

        ``req_to_token`` ``[rows, tokens]``: SGLang's table.
        """
        begin_step(
            req_to_token, rows, lengths, active,
            step=self.of_batch(rows.numel()), begins=self.begins(rows.numel()),
            whole=self.whole(rows.numel()), whole_beyond=self._whole_steps.beyond, whole_steps=self._whole_steps.steps,
            lengths_by_row=self.lengths, first_lengths=self.first_lengths,
        )  # fmt: skip

    def load_nothing(self) -> None:
        """Make the step empty, for recording a graph and for steps without rows."""
        self.active_rows.fill_(0)

    @functools.cache  # noqa: B019 (lives as long as the backend)
    def of_batch(self, count: int) -> Step:
        return Step(self._page_table[:count], self._lengths[:count], self._row_of[:count], self.active_rows)

    def begins(self, count: int) -> torch.Tensor:
        """Return ``[count]``: 1 for rows that have no resident blocks yet."""
        return self._begins[:count]

    def whole(self, count: int) -> torch.Tensor:
        """Return ``[count]``: 1 for rows that are in one of their ``WholeSteps``."""
        return self._whole[:count]

    def let_rows_go(self, count: int, handover: Handover | None) -> None:
        """Mark all rows as having no resident blocks, except rows of this step that go on, which ``handover`` notes.

        A row goes on if ``handover`` has its query of the token before. It keeps the count of its first steps. Other
        rows that decoded before this step are marked as let go: their first steps count as over. The caller must load
        the rows of this step again afterwards.
        """
        let_rows_go(
            self.of_batch(count), lengths_by_row=self.lengths, first_lengths=self.first_lengths,
            kept_lengths=handover.lengths if handover else None, goes_on=handover.goes_on(count) if handover else None,
        )  # fmt: skip

    def reset_rows(self, rows: torch.Tensor, state: int) -> None:
        self.first_lengths.index_fill_(0, rows, state)
