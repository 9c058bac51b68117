"""The first decode steps of a long row attend to everything, as if their tokens were of the prompt.

What a row attends to is chosen by the queries of the steps before. Before its first step there are only those of the
prompt, whose end asks for other things than an answer's beginning. And that beginning decides: which of many similar
lines is quoted, say. The price is to read the row's pages once more in each of these steps.

These rows take the way of prefill, beside the step of the others. The CUDA engine does without: there the kernel that
ends a layer reads what is worth it from the host pool, in the same graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_hybrid.engines.base import Engine, PrefillBatch, StepBatch


@dataclass(frozen=True)
class SplitStep:
    """A step that is one of the first of some of its rows."""

    whole: StepBatch
    first: list[int]  # of the batch
    others: list[int]

    @cached_property
    def _indices(self) -> tuple[torch.Tensor, torch.Tensor]:
        first, others = (
            torch.tensor(part, dtype=torch.int64, device=self.whole.rows.device) for part in (self.first, self.others)
        )
        return first, others

    def begin(self, engine: Engine) -> None:
        # the step first: rows that arrived are reset with it
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
        """The part ``[others, ...]`` of a tensor ``[B, ...]``."""
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
        """As ``Engine.decode``."""
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


# Steps of others that a row is waited for: some requests end with their prompt, or in one of their first steps.
PATIENCE = 8


@dataclass
class _Row:
    steps: int  # first ones that it has yet
    patience: int = PATIENCE


class FirstSteps:
    """Rows that are in their first steps, or have not decoded yet."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Row] = {}

    def begin(self, rows: torch.Tensor, steps: int) -> None:
        """Prompts of these rows are being computed, or arrived, or rows were rewound to them."""
        self._waiting.update({row: _Row(steps) for row in rows.tolist()})

    @property
    def any_waits(self) -> bool:
        """Otherwise there is nothing to ask about a step."""
        return bool(self._waiting)

    def take(self, batch: StepBatch, longer_than: int) -> SplitStep | None:
        """A step that begins now. None where no row of more than ``longer_than`` tokens is in one of its first."""
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
