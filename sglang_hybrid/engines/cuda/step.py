"""What the kernels of a decode step read: persistent, so that a recorded graph finds it where it was."""

from __future__ import annotations

import functools

import torch

from sglang_hybrid.engines.cuda.handover import Handover
from sglang_hybrid.engines.cuda.settings import WholeSteps
from sglang_hybrid.ops.cuda.step import Step, begin_step, let_rows_go

# instead of a row's first length, before its first step: sh_first_length
PREFILLED = -2  # its resident blocks were chosen when its prompt was computed
ARRIVED = -1  # nothing of it is resident


class StepBuffers:
    """Rows of the current step. Written before its layers, on the stream that runs them."""

    def __init__(
        self, rows: int, most: int, max_blocks: int, device: torch.device | str, *, whole: WholeSteps | None = None
    ) -> None:
        """``rows`` that SGLang knows, at most ``most`` of them in a step, of at most ``max_blocks`` blocks."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._page_table, self._lengths, self._row_of = zeros(most, max_blocks), zeros(most), zeros(most)
        self._begins, self._whole, self._whole_steps = zeros(most), zeros(most), whole or WholeSteps(0, steps=0)
        self.active_rows = zeros(1)
        self.lengths = zeros(rows)
        self.first_lengths = torch.full((rows,), ARRIVED, dtype=torch.int32, device=device)

    def load(self, req_to_token: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, active: int) -> None:
        """req_to_token ``[rows, tokens]``: SGLang's table; rows and lengths ``[n]``, the first ``active`` are real."""
        begin_step(
            req_to_token, rows, lengths, active,
            step=self.of_batch(rows.numel()), begins=self.begins(rows.numel()),
            whole=self.whole(rows.numel()), whole_beyond=self._whole_steps.beyond, whole_steps=self._whole_steps.steps,
            lengths_by_row=self.lengths, first_lengths=self.first_lengths,
        )  # fmt: skip

    def load_nothing(self) -> None:
        """A step without rows, for recording."""
        self.active_rows.fill_(0)

    @functools.cache  # noqa: B019 (lives as long as the backend)
    def of_batch(self, count: int) -> Step:
        return Step(self._page_table[:count], self._lengths[:count], self._row_of[:count], self.active_rows)

    def begins(self, count: int) -> torch.Tensor:
        """``[count]``: 1 for rows of which nothing is resident yet."""
        return self._begins[:count]

    def whole(self, count: int) -> torch.Tensor:
        """``[count]``: 1 for rows that are in one of their ``WholeSteps``."""
        return self._whole[:count]

    def let_rows_go(self, count: int, handover: Handover | None) -> None:
        """Mark rows as having no resident blocks, but for those of this step that go on, as ``handover`` gets to know.

        Rows that decoded before this step are marked as let go: their first steps count as over. Those that go on keep
        theirs. Load the rows of the present step again afterwards.
        """
        let_rows_go(
            self.of_batch(count), lengths_by_row=self.lengths, first_lengths=self.first_lengths,
            kept_lengths=handover.lengths if handover else None, goes_on=handover.goes_on(count) if handover else None,
        )  # fmt: skip

    def reset_rows(self, rows: torch.Tensor, state: int) -> None:
        self.first_lengths.index_fill_(0, rows, state)
