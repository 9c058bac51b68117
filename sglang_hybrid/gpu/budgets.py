"""What a row may have in device memory: fewer rows, larger budgets.

The memory of all slots is shared equally by the rows that run. At level L there are places for 1/2^L of the rows that
SGLang knows, each with 2^L times the slots and the budget; level 0 is everybody's, and there rows are their own places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_hybrid.cuda.digests import SlotTable
from sglang_hybrid.cuda.places import Places
from sglang_hybrid.gpu.room import loading_pays
from sglang_hybrid.gpu.slots import ResidentSlots


@dataclass(frozen=True)
class Budget:
    """One level."""

    level: int
    blocks: int  # that a selection has
    slots: ResidentSlots
    tables: list[SlotTable]  # of each layer
    places: Places | None  # None: rows are their own
    lengths: torch.Tensor  # [rows or places] int32
    first_lengths: torch.Tensor  # likewise

    @property
    def rows(self) -> int:
        """That a step may have."""
        return int(self.slots.all_positions.shape[1])


class Level:
    """Which level the running rows have. It falls when rows need room, and rises when that pays."""

    def __init__(self, rows: Sequence[int], row_bytes: int) -> None:
        """``rows`` of each level. ``row_bytes``: the slots of a row of level 0, in all layers and KV heads."""
        self._rows, self._row_bytes = list(rows), row_bytes
        self.now = 0
        self._changed = float("-inf")  # when

    def look(self, rows: int, now: float) -> int:
        """For a step of so many rows that begins now."""
        highest = max(level for level, most in enumerate(self._rows) if level == 0 or rows <= most)
        loaded = rows * self._row_bytes << highest
        if highest < self.now or (highest > self.now and loading_pays(loaded, now - self._changed)):
            self.now, self._changed = highest, now
        return self.now
