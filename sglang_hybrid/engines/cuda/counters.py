"""What the device has counted, looked at without waiting for it."""

from __future__ import annotations

import torch


class Counters:
    """Copies of a tensor in device memory that arrive some time later."""

    def __init__(self, counted: torch.Tensor) -> None:
        self._counted = counted
        self._copy = torch.empty(counted.shape, dtype=counted.dtype).pin_memory()
        self._arrived: torch.cuda.Event | None = None
        self._before: torch.cuda.Event | None = None  # when the look before the last one began
        self.seconds: float | None = None  # on the device, between the beginnings of the last two looks

    def look(self) -> torch.Tensor | None:
        """What was counted when the last look began; None if it has not arrived yet."""
        if self._arrived is None or not self._arrived.query():
            return None
        if self._before is not None:
            self.seconds = self._before.elapsed_time(self._arrived) / 1e3
        self._before, self._arrived = self._arrived, None
        return self._copy.clone()

    def begin(self) -> None:
        """Begin to look, on the current stream."""
        self._copy.copy_(self._counted, non_blocking=True)
        self._arrived = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
        self._arrived.record(torch.cuda.current_stream())

    @property
    def is_looking(self) -> bool:
        return self._arrived is not None
