"""The rows of a decode step, and the kernels at its beginning, which translate SGLang's tables in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.structs import KernelStruct, struct
from sglang_hybrid.ops.cuda.tensors import active_address, address


@dataclass(frozen=True)
class Step:
    """The rows of a decode step. Lengths include the token that is being computed, whose block is the tail."""

    page_table: torch.Tensor  # [B, max_blocks] int32
    lengths: torch.Tensor  # [B] int32
    row_of: torch.Tensor  # [B] int32
    active_rows: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        return self.page_table.shape[0]

    @property
    def max_blocks(self) -> int:
        return self.page_table.shape[1]

    def arguments(self) -> KernelStruct:
        return struct(
            "step",
            page_table=address("page_table", self.page_table, torch.int32, (self.batch, self.max_blocks)),
            lengths=address("lengths", self.lengths, torch.int32, (self.batch,)),
            row_of=address("row_of", self.row_of, torch.int32, (self.batch,)),
            active_rows=active_address(self.active_rows),
            batch=self.batch,
            max_blocks=self.max_blocks,
        )


def begin_step(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    active: int,
    *,
    step: Step,
    begins: torch.Tensor,
    whole: torch.Tensor,
    whole_beyond: int,
    whole_steps: int,
    lengths_by_row: torch.Tensor,
    first_lengths: torch.Tensor,
) -> None:
    """Fill ``step`` with rows and lengths ``[B]``, int64 or int32, of which the first ``active`` are real.

    req_to_token ``[rows, tokens]`` int32 is SGLang's table. Outputs are int32. begins ``[B]``: 1 for rows without
    resident blocks. whole ``[B]``: 1 for rows of more than ``whole_beyond`` tokens in their first ``whole_steps``
    steps. lengths_by_row ``[rows]``: the row's length. first_lengths ``[rows]``: the row's length in its first step.
    """
    batch, known = step.batch, lengths_by_row.shape[0]
    if rows.dtype != lengths.dtype:
        lengths = lengths.to(rows.dtype)
    integers = (torch.int64, torch.int32)
    launch(
        "begin_step",
        req_to_token=address("req_to_token", req_to_token, torch.int32, (known, req_to_token.shape[1])),
        rows=address("rows", rows, integers, (batch,)),
        lengths=address("lengths", lengths, integers, (batch,)),
        page_table=address("page_table", step.page_table, torch.int32, (batch, step.max_blocks)),
        step_lengths=address("the step's lengths", step.lengths, torch.int32, (batch,)),
        row_of=address("row_of", step.row_of, torch.int32, (batch,)),
        begins=address("begins", begins, torch.int32, (batch,)),
        whole=address("whole", whole, torch.int32, (batch,)),
        active_rows=active_address(step.active_rows),
        lengths_by_row=address("lengths_by_row", lengths_by_row, torch.int32, (known,)),
        first_lengths=address("first_lengths", first_lengths, torch.int32, (known,)),
        row_tokens=req_to_token.shape[1],
        rows_known=known,
        batch=batch,
        max_blocks=step.max_blocks,
        active=active,
        wide=rows.dtype == torch.int64,
        whole_beyond=whole_beyond,
        whole_steps=whole_steps,
    )


def let_rows_go(
    step: Step,
    *,
    lengths_by_row: torch.Tensor,
    first_lengths: torch.Tensor,
    kept_lengths: torch.Tensor | None = None,
    goes_on: torch.Tensor | None = None,
) -> None:
    """Stop holding whole rows in device memory, and mark in ``first_lengths`` which rows have nothing resident.

    ``kept_lengths`` ``[rows]`` int32: lengths of ``LastQueries``. A row of the step goes on with slots if the query of
    its previous token was kept; ``goes_on`` ``[B]`` int32 receives 1 for such rows. All other rows are marked in
    ``first_lengths`` ``[rows]`` of ``begin_step``. Without ``kept_lengths`` no row goes on.
    """
    rows = first_lengths.shape[0]
    if (kept_lengths is None) != (goes_on is None):
        raise ValueError("who goes on is told by kept lengths, and kept lengths tell who does")
    launch(
        "let_rows_go",
        step=step.arguments(),
        kept_lengths=address("kept_lengths", kept_lengths, torch.int32, (rows,)),
        lengths_by_row=address("lengths_by_row", lengths_by_row, torch.int32, (rows,)),
        first_lengths=address("first_lengths", first_lengths, torch.int32, (rows,)),
        goes_on=address("goes_on", goes_on, torch.int32, (step.batch,)),
        rows=rows,
    )
