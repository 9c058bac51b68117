"""Places of rows, where slots are for fewer rows than SGLang knows."""

from __future__ import annotations

import torch

from sglang_hybrid.cuda.dense_structs import PlaceRows
from sglang_hybrid.cuda.digests import Step
from sglang_hybrid.cuda.library import launch, library
from sglang_hybrid.cuda.tensors import address
from sglang_hybrid.ops.reference import NO_BLOCK

_NOBODY = -1


class Places:
    """Who is where: state between launches of ``place_rows``."""

    def __init__(self, rows: int, positions: torch.Tensor) -> None:
        """``rows`` that SGLang knows. positions ``[layers, places, KV heads, slots]``: of the blocks in slots."""
        count, device = positions.shape[1], positions.device

        def numbers(size: int, value: int) -> torch.Tensor:
            return torch.full((size,), value, dtype=torch.int32, device=device)

        self._positions = positions
        self._places, self._owners = numbers(rows, _NOBODY), numbers(count, _NOBODY)
        self.lengths, self.first_lengths = numbers(count, 0), numbers(count, 0)

    @property
    def count(self) -> int:
        return int(self._positions.shape[1])

    def forget_all(self) -> None:
        """Nobody has a place."""
        self._owners.fill_(_NOBODY)
        self._positions.fill_(NO_BLOCK)

    def rows_begin(self, rows: torch.Tensor) -> None:
        """These rows ``[n]`` int64 are other requests from now on."""
        self._places.index_fill_(0, rows, _NOBODY)

    def place_rows(self, step: Step, begins: torch.Tensor, refused: torch.Tensor | None = None) -> None:
        """From here on ``step`` has places instead of rows.

        Rows that stay keep theirs. begins ``[B]``: 1 for those that are new in their place, which has nothing in its
        slots. Rows that find no place have -1, and are added to ``refused`` (one int64).
        """
        layers, count, heads, slots = self._positions.shape
        rows = self._places.shape[0]
        arguments = PlaceRows(
            step=step.arguments(),
            row_of=address("row_of", step.row_of, torch.int32, (step.batch,)),
            begins=address("begins", begins, torch.int32, (step.batch,)),
            places=address("places", self._places, torch.int32, (rows,)),
            owners=address("owners", self._owners, torch.int32, (count,)),
            lengths=address("lengths", self.lengths, torch.int32, (count,)),
            first_lengths=address("first_lengths", self.first_lengths, torch.int32, (count,)),
            positions=address("positions", self._positions, torch.int32, (layers, count, heads, slots)),
            refused=None if refused is None else address("refused", refused.view(-1), torch.int64, (1,)),
            rows=rows,
            count=count,
            layers=layers,
            place_slots=heads * slots,
        )
        launch(library().sh_cuda_place_rows, arguments)
