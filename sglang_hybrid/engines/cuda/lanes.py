"""Streams beside the main one. In a graph that is being recorded they become its branches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Lane:
    """Work that begins when the main lane has come this far, and that the main lane waits for where it needs it."""

    def __init__(self, device: torch.device | str, urgent: bool = False) -> None:
        """``urgent``: its CTAs run before those of other lanes that are not running yet."""
        priority = -1 if urgent else 0
        self._stream = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call, unused-ignore]
        self._marks: dict[int, torch.cuda.Event] = {}

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched inside runs on this lane, after all that was launched on the current one."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self, number: int) -> None:
        """Remember how far this lane has come."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        event.record(self._stream)
        self._marks[number] = event

    def wait_for(self, number: int) -> None:
        """The current stream waits until this lane has come to the mark."""
        torch.cuda.current_stream().wait_event(self._marks.pop(number))
