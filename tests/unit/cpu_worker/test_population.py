"""A worker serves requests while a thread still maps its pool, and ends that thread when asked to."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from worker_process import PATIENCE_S

from cpu_worker.population import Population


class LargeMapping:
    """A mapping whose population never ends by itself, only when cancelled."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def populate(self, _threads: int, cancelled: Callable[[], bool]) -> None:
        self.begun.set()
        while not cancelled():
            self.begun.wait(0.01)
        self.ended.set()


def test_it_runs_beside_its_owner_until_it_is_told_to_stop() -> None:
    """A new worker need not wait until its whole pool is mapped, which takes seconds for a large pool."""
    mapping = LargeMapping()
    running = Population(mapping)  # type: ignore[arg-type]
    assert mapping.begun.wait(PATIENCE_S) and not mapping.ended.is_set()
    running.stop()
    assert mapping.ended.is_set()
    running.stop()


def test_without_a_thread_pages_come_as_they_are_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_thread(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    Population(LargeMapping()).stop()  # type: ignore[arg-type]
    assert "when they are first read: can't start new thread" in caplog.text
