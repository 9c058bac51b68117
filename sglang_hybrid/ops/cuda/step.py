"""The beginning of a decode step: SGLang's tables become what the kernels read, in one launch."""

from __future__ import annotations

import torch

from sglang_hybrid.ops.cuda.digests import Step
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.tensors import active_address, address


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

    req_to_token ``[rows, tokens]`` int32. begins ``[B]``: 1 for rows of which nothing is resident. whole ``[B]``: 1 for
    rows of more than ``whole_beyond`` tokens in their first ``whole_steps`` steps. first_lengths ``[rows]``: gets a
    row's length in its first step.
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
