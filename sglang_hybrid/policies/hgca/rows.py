"""Map running rows to entries of the layers' state.

State is kept for running rows only: SGLang has thousands of row numbers, uses them in turn, and does not report the end
of a request. A row without state gets new state from the KV cache, so state may be dropped at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

_IDLE_STEPS = 64  # decode steps without a row after which the row's request has most likely ended


@dataclass
class _Row:
    entry: int
    length: int  # the row's tokens at its last step
    step: int  # number of its last step


class RowEntries:
    """Index of each row's state, by SGLang's row number."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._free: list[int] = []
        self._steps = 0
        self.capacity = 0  # entries are below this number

    def forget(self, rows: list[int]) -> None:
        """Drop the state of ``rows``, and free their entries."""
        for row in rows:
            if known := self._rows.pop(row, None):
                self._free.append(known.entry)

    def take(self, rows: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
        """Return the entries of a step's rows, and the indices of those rows whose entries hold no state yet.

        ``lengths`` include the step's token. A row that did not grow by exactly this token since its last step counts
        as a row without state.
        """
        self._steps += 1
        fresh = []
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            known = self._rows.get(row)
            if known is None or known.length != length - 1:
                fresh.append(index)
            entry = known.entry if known else self._new_entry()
            self._rows[row] = _Row(entry, length, self._steps)
        return [self._rows[row].entry for row in rows], fresh

    def _new_entry(self) -> int:
        if not self._free:
            self.forget([row for row, known in self._rows.items() if known.step < self._steps - _IDLE_STEPS])
        if not self._free:
            self._free = list(range(self.capacity, max(8, 2 * self.capacity)))
            self.capacity = self._free[-1] + 1
        return self._free.pop()
