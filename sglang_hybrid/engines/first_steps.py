"""The first decode step of a long row attends to everything, as if its token were one more of the prompt.

What a row attends to is chosen by the queries of the steps before. Before its first step there are only those of the
prompt, whose end asks for other things than an answer's beginning. And that beginning decides: which of many similar
lines is quoted, say. The price is to read the row's pages once more.

These rows take the way of prefill, beside the step of the others. The CUDA engine does without: there the kernel that
ends a layer reads whole rows from the host pool, in the same graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_hybrid.engines.base import Engine, PrefillBatch, StepBatch


@dataclass(frozen=True)
class SplitStep:
    """A step some of whose rows are in their first one."""

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


# Steps of others that a row is waited for: some requests end with their prompt.
PATIENCE = 8


class FirstSteps:
    """Rows that have not decoded yet."""

    def __init__(self) -> None:
        self._waiting: dict[int, int] = {}  # steps that each is waited for yet

    def begin(self, rows: torch.Tensor) -> None:
        """Prompts of these rows are being computed, or arrived, or rows were rewound to them."""
        self._waiting.update(dict.fromkeys(rows.tolist(), PATIENCE))

    @property
    def any_waits(self) -> bool:
        """Otherwise there is nothing to ask about a step."""
        return bool(self._waiting)

    def take(self, batch: StepBatch, longer_than: int) -> SplitStep | None:
        """A step that begins now. None where no row of more than ``longer_than`` tokens is in its first one."""
        first, here = self._first_of(batch, longer_than), set(_rows(batch))
        self._waiting = {row: left - 1 for row, left in self._waiting.items() if row not in here and left > 1}
        if not first:
            return None
        others = sorted(set(range(batch.rows.shape[0])) - set(first))
        return SplitStep(batch, first, others)

    def _first_of(self, batch: StepBatch, longer_than: int) -> list[int]:
        lengths = batch.lengths_on_host.tolist()
        return [i for i, row in enumerate(_rows(batch)) if row in self._waiting and lengths[i] > longer_than]


def _rows(batch: StepBatch) -> list[int]:
    rows: list[int] = batch.rows[: batch.rows.shape[0] - batch.padding].tolist()
    return rows
