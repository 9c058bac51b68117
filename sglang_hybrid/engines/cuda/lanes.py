"""CUDA streams beside the main stream. When a CUDA graph is recorded they become its branches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Lane:
    """A stream whose work starts after what the current stream has launched, and which others wait for at marks."""

    def __init__(self, device: torch.device | str, urgent: bool = False) -> None:
        """Create the stream. ``urgent``: its CTAs start before waiting CTAs of other lanes."""
        priority = -1 if urgent else 0
        self._stream = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call, unused-ignore]
        self._marks: dict[int, torch.cuda.Event] = {}

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """Launch all work within this context on this lane, after everything launched so far on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self, number: int) -> None:
        """Record how far this lane's launches have come, as mark ``number``."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        event.record(self._stream)
        self._marks[number] = event

    def wait_for(self, number: int) -> None:
        """Make the current stream wait until this lane has reached mark ``number``, and remove the mark."""
        torch.cuda.current_stream().wait_event(self._marks.pop(number))
