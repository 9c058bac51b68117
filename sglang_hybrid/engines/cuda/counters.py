"""Counters in device memory, read without waiting for the device."""

from __future__ import annotations

import torch


class Counters:
    """Reads a tensor of counters in device memory by asynchronous copies to pinned host memory."""

    def __init__(self, counted: torch.Tensor) -> None:
        self._counted = counted
        self._copy = torch.empty(counted.shape, dtype=counted.dtype).pin_memory()
        self._arrived: torch.cuda.Event | None = None
        self._before: torch.cuda.Event | None = None  # of the copy that ``look`` returned last
        self.seconds: float | None = None  # device time between the last two copies that arrived

    def look(self) -> torch.Tensor | None:
        """Return the counters as of the last ``begin``; None if that copy has not arrived or was returned before."""
        if self._arrived is None or not self._arrived.query():
            return None
        if self._before is not None:
            self.seconds = self._before.elapsed_time(self._arrived) / 1e3
        self._before, self._arrived = self._arrived, None
        return self._copy.clone()

    def begin(self) -> None:
        """Start a copy of the counters, on the current stream."""
        self._copy.copy_(self._counted, non_blocking=True)
        self._arrived = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
        self._arrived.record(torch.cuda.current_stream())

    @property
    def is_looking(self) -> bool:
        return self._arrived is not None
