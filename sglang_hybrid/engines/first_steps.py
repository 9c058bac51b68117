"""In the first decode steps of a long row, the row attends to all tokens, as if the new tokens were part of its prompt.

Resident blocks are chosen by queries of earlier steps. Before its first step a row has only queries of its prompt, and
the end of a prompt asks for other tokens than the beginning of an answer. The beginning of an answer matters: for
example, it decides which of many similar lines is quoted. The price is to read the row's pages once more in each of
these steps.

Rows in their first steps are computed by prefill, beside the decode step of the other rows. The CUDA engine does not
need this: there the kernel that ends a layer also reads, in the same graph, the blocks in the host pool that have
enough of the real query's estimated attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_hybrid.engines.base import Engine, PrefillBatch, StepBatch


@dataclass(frozen=True)
class SplitStep:
    """A decode step in which some rows are in their first steps, and so are computed by prefill."""

    whole: StepBatch
    first: list[int]  # indices in the batch of rows in their first steps
    others: list[int]  # indices of all other rows

    @cached_property
    def _indices(self) -> tuple[torch.Tensor, torch.Tensor]:
        first, others = (
            torch.tensor(part, dtype=torch.int64, device=self.whole.rows.device) for part in (self.first, self.others)
        )
        return first, others

    def begin(self, engine: Engine) -> None:
        # begin_step comes first, because it resets rows that arrived
        engine.begin_step(self._batch_of_others())
        first = self._indices[0]
        engine.begin_prefill(
            PrefillBatch(
                rows=self.whole.rows[first],
                lengths=self.whole.lengths_on_host[self.first].tolist(),
                new_tokens=[1] * len(self.first),
                slots=self.whole.slots[first],
            )
        )

    def of_others(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the other rows of a tensor: ``[B, ...]`` -> ``[others, ...]``."""
        return tensor[self._indices[1]]

    def attend(
        self,
        engine: Engine,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Do what ``Engine.decode`` does, with prefill for rows in their first steps and decode for the others."""
        out = query.new_empty(query.shape[0], query.shape[1], values.shape[2])
        for part, attend in zip(self._indices, (engine.prefill, engine.decode), strict=True):
            if len(part):
                out[part] = attend(layer, query[part], keys[part], values[part], scale)
        return out

    def _batch_of_others(self) -> StepBatch:
        others = self._indices[1]
        return StepBatch(
            rows=self.whole.rows[others],
            lengths=self.whole.lengths[others],
            lengths_on_host=self.whole.lengths_on_host[self.others],
            slots=self.whole.slots[others],
        )


# Steps without a row after which the row is forgotten: some requests end with their prompt or in their first steps.
PATIENCE = 8


@dataclass
class _Row:
    steps: int  # first steps that are left
    patience: int = PATIENCE  # steps of other rows that are left


class FirstSteps:
    """Set of rows that are in their first steps, or have not decoded yet."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Row] = {}

    def begin(self, rows: torch.Tensor, steps: int) -> None:
        """Give each of ``rows`` ``steps`` first steps: its prompt is new, or the row was rewound to its prompt."""
        self._waiting.update({row: _Row(steps) for row in rows.tolist()})

    @property
    def any_waits(self) -> bool:
        """Return True if some row has first steps to come. Otherwise ``take`` need not be called."""
        return bool(self._waiting)

    def take(self, batch: StepBatch, longer_than: int) -> SplitStep | None:
        """Count the step that begins now, and return how to split it, or None if the engine decodes all its rows.

        Only rows of more than ``longer_than`` tokens are split off. Call this once for each step.
        """
        first = self._first_of(batch, longer_than)
        self._count(set(_rows(batch)))
        if not first:
            return None
        others = sorted(set(range(batch.rows.shape[0])) - set(first))
        return SplitStep(batch, first, others)

    def _count(self, here: set[int]) -> None:
        for number, row in list(self._waiting.items()):
            if number in here:
                row.steps, row.patience = row.steps - 1, PATIENCE
            else:
                row.patience -= 1
            if not row.steps or not row.patience:
                del self._waiting[number]

    def _first_of(self, batch: StepBatch, longer_than: int) -> list[int]:
        lengths = batch.lengths_on_host.tolist()
        return [i for i, row in enumerate(_rows(batch)) if row in self._waiting and lengths[i] > longer_than]


def _rows(batch: StepBatch) -> list[int]:
    rows: list[int] = batch.rows[: batch.rows.shape[0] - batch.padding].tolist()
    return rows
