"""Base class of step programs that start work on a layer by its predicted query, while the layer before runs."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch

from sglang_hybrid.engines.cuda.lanes import Lane
from sglang_hybrid.engines.cuda.program import QueryAhead, StepProgram


class AheadProgram(StepProgram):
    """Step program that runs predictions, and the work that follows them, on the scout lane.

    Subclasses create ``_scout`` and ``_ahead``.
    """

    _scout: Lane
    _ahead: set[int]  # layers of this step on which work was started by a predicted query

    @contextlib.contextmanager
    def scout_lane(self) -> Iterator[None]:
        with self._scout.fork():
            yield

    def predict(
        self,
        queries: Sequence[QueryAhead],
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> None:
        if self.is_dense:
            return
        count = hidden.shape[0]
        for query in queries:  # on the main lane: the layer changes these inputs in place
            query.predictor.prepare(hidden, residual)
        with self.scout_lane():
            for query in queries:
                query.predictor.finish(positions, self.query_ahead(query.layer, count))
                self.ahead(query.layer, count, query.scale)

    @abstractmethod
    def query_ahead(self, layer: int, count: int) -> torch.Tensor:
        """Return the buffer for the predicted query of a layer: ``[count, query heads, head_dim]``."""

    @abstractmethod
    def ahead(self, layer: int, count: int, scale: float) -> None:
        """Start work on a layer, on the scout lane. Its predicted query is in the buffer of ``query_ahead``."""
