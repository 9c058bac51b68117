"""Events that a server sends to its launcher's console: they never block the server, and become readable lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_hybrid import events
from sglang_hybrid.commands.console import Console, Facts, Progress, complain, last_words, prefill_line
from sglang_hybrid.config import HybridConfig


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[events.Reader]:
    made = events.Reader(tmp_path / "events")
    monkeypatch.setenv("SGLANG_HYBRID_EVENTS", str(made.path))
    monkeypatch.setattr(events, "_fifo", None)
    yield made
    made.close()


def test_what_is_told_arrives_in_order(reader: events.Reader) -> None:
    told: list[events.AnyEvent] = [
        events.Ready(url="http://h:1", model="M"),
        events.Prefill(done=0, chunk=8, total=9, running=1, waiting=0),
    ]
    for event in told:
        events.tell(event)
    assert reader.read() == told
    assert reader.read() == []


def test_lines_that_are_no_events_are_skipped(reader: events.Reader) -> None:
    with reader.path.open("wb") as fifo:
        fifo.write(b'nonsense\n{"type":"Other"}\n')
    events.tell(events.Idle())
    assert reader.read() == [events.Idle()]


def test_a_full_fifo_does_not_block_the_server(reader: events.Reader) -> None:
    for _ in range(100_000):
        events.tell(events.Idle())
    assert 0 < len(reader.read()) < 100_000


def test_a_reader_that_is_gone_does_not_disturb_the_server(reader: events.Reader) -> None:
    events.tell(events.Idle())
    os.close(reader.fileno())
    events.tell(events.Idle())
    reader._fd = os.open(os.devnull, os.O_RDONLY)  # for the fixture to close


def test_without_a_launcher_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_EVENTS", "")
    monkeypatch.setattr(events, "_fifo", None)
    assert not events.enabled()
    events.tell(events.Idle())


def test_progress_of_a_prompt_counts_the_layers_of_the_chunk_under_way() -> None:
    chunk = events.Prefill(done=2048, chunk=2048, total=8192, running=1, waiting=2)
    assert prefill_line(chunk, 0.0) == "prompt:  25 % of 8,192 tokens, 2 waiting"
    assert prefill_line(chunk, 0.5) == "prompt:  38 % of 8,192 tokens, 2 waiting"


def test_short_requests_print_nothing_where_no_line_can_be_updated(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(Console())
    progress.show(events.Prefill(done=0, chunk=8, total=9, running=1, waiting=0))
    progress.show(events.Decode(running=1, waiting=0, tokens=4, seconds=0.5))
    progress.show(events.Idle())
    assert capsys.readouterr().out == ""


def test_long_requests_print_a_line_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = Progress(Console())
    for now in (100.0, 105.0, 111.0, 112.0, 122.0):  # noqa: B007
        progress.show(events.Decode(running=3, waiting=1, tokens=6, seconds=0.5))
    assert capsys.readouterr().out.splitlines() == ["3 running, 1 waiting, 12.0 tokens/s"] * 2


def test_the_facts_are_model_memory_policy_and_worker() -> None:
    facts = Facts(HybridConfig())
    facts.take(events.Model(layers=30, dtype="float32", device="cpu", context_tokens=8192))
    facts.take(events.Pool(tokens=20512, host_bytes=1 << 30, device_bytes=0))
    model, memory, policy, worker = facts.lines()
    assert "30 layers in float32 on cpu" in model
    assert "1.00 GiB of host memory for 20,512 tokens" in memory
    assert "scout: a budget of 2,048 tokens" in policy
    assert "none" in worker
    facts.take(events.Worker(pid=7, provider="native", variant="neon", threads=1))
    assert "process 7: native kernels (neon), 1 thread" in facts.lines()[3]


def test_an_error_has_at_most_five_lines(capsys: pytest.CaptureFixture[str]) -> None:
    complain("\n".join(f"problem {n}" for n in range(9)))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["sglang-hybrid: problem 0", *(f"problem {n}" for n in (1, 2, 3)), "... and 5 more"]


def test_the_exception_at_the_end_of_a_log_is_what_it_said_last() -> None:
    log = ["Traceback (most recent call last):", "  File x", "ValueError: no such thing", "[21:07] Received sigquit"]
    assert last_words(log) == "ValueError: no such thing"
    assert last_words(["a", "b", "c", "d"]) == "b\nc\nd"
