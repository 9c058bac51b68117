"""A report continues where it stopped, and one failed experiment does not stop the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from report_doubles import Sessions, fake_context
from test_report_experiments import Quiet

from sglang_hybrid.commands.report.cache import Cache, key_of
from sglang_hybrid.commands.report.content import Note
from sglang_hybrid.commands.report.context import Context
from sglang_hybrid.commands.report.experiments import EXPERIMENTS
from sglang_hybrid.commands.report.experiments.base import Experiment, Shown
from sglang_hybrid.commands.report.running import run_all, run_one


class Counting(Experiment):
    title, paper, question = "Counts", "all", "How often does it run?"
    numbers: ClassVar = ("windows",)
    uses = "speed"

    def __init__(self, name: str, error: BaseException | None = None) -> None:
        self.name, self.error, self.runs = name, error, 0  # type: ignore[misc]

    def run(self, context: Context) -> dict[str, Any]:
        self.runs += 1
        if self.error:
            raise self.error
        return {"runs": self.runs}

    def draw(self, result: dict[str, Any]) -> Shown:
        return Shown((Note(f"ran {result['runs']} times"),))


def test_a_result_is_measured_once(tmp_path: Path) -> None:
    experiment = Counting("counts")
    for _ in range(2):
        section = run_one(experiment, fake_context(tmp_path, Sessions()), ["report"])
    assert experiment.runs == 1
    assert section.status == "measured"
    document = json.loads((tmp_path / "results" / "counts.json").read_text())
    assert document["result"] == {"runs": 1}
    assert document["origin"]["machine"]["cores"] > 0


def test_another_size_is_measured_anew_if_the_experiment_depends_on_it(tmp_path: Path) -> None:
    experiment = Counting("counts")
    for changes in ([], ["rate_steps=7"], ["windows=3"]):
        context = fake_context(tmp_path, Sessions())
        context.size = context.size.changed(changes)
        run_one(experiment, context, ["report"])
    assert experiment.runs == 2


def test_an_interrupted_report_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first, second, third = Counting("first"), Counting("second", KeyboardInterrupt()), Counting("third")
    sessions = Sessions()
    with pytest.raises(KeyboardInterrupt):
        run_all([first, second, third], fake_context(tmp_path, sessions), Quiet(), ["report"])
    second.error = None
    sections = run_all([first, second, third], fake_context(tmp_path, sessions), Quiet(), ["report"])
    assert [one.status for one in sections] == ["measured"] * 3
    assert (first.runs, second.runs, third.runs) == (1, 2, 1)


def test_processes_are_ended_when_a_report_is_interrupted(tmp_path: Path) -> None:
    sessions = Sessions()
    experiments = [next(one for one in EXPERIMENTS if one.name == "scout-ratio"), Counting("then", KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        run_all(experiments, fake_context(tmp_path, sessions), Quiet(), ["report"])
    assert sessions.started and not any(session.is_alive for session in sessions.started)


def test_fresh_results_are_measured_once_per_report(tmp_path: Path) -> None:
    experiment = Counting("counts")
    run_one(experiment, fake_context(tmp_path, Sessions()), ["report"])
    context = fake_context(tmp_path, Sessions())
    context.cache = Cache(tmp_path / "results", fresh=True)
    run_one(experiment, context, ["report"])
    run_one(experiment, context, ["report"])
    assert experiment.runs == 2


def test_one_experiment_that_fails_is_shown_and_the_others_go_on(tmp_path: Path) -> None:
    bad, good, watcher = Counting("bad", ZeroDivisionError("by <zero>")), Counting("good"), Quiet()
    failed, done = run_all([bad, good], fake_context(tmp_path, Sessions()), watcher, ["report"])
    assert failed.status == "failed"
    assert [element.text for element in failed.elements if isinstance(element, Note)] == [
        "ZeroDivisionError: by <zero>"
    ]
    assert done.status == "measured"
    assert watcher.ended == [("bad", "failed"), ("good", "measured")]
    run_all([bad, good], fake_context(tmp_path, Sessions()), watcher, ["report"])
    assert (bad.runs, good.runs) == (2, 1), "what failed is tried again, what was measured is not"


def test_a_measurement_that_fails_fails_its_experiments_only(tmp_path: Path) -> None:
    sessions = Sessions(failing=frozenset({"evaluate"}))
    sections = run_all(EXPERIMENTS, fake_context(tmp_path, sessions), Quiet(), ["report"])
    by_name = {one.name: one.status for one in sections}
    assert by_name["scout-ablation"] == "failed"
    assert by_name["scout-ratio"] == by_name["scout-length"] == "measured"
    assert by_name["hgca-perplexity"] == "skipped"


def test_a_damaged_result_counts_as_none(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put("one", "key", {"value": 1.5, "infinite": float("inf")})
    assert cache.get("one", "key") == {"key": "key", "value": 1.5, "infinite": None}
    assert cache.get("one", "another") is None
    (tmp_path / "one.json").write_text('{"key": "ke')
    assert cache.get("one", "key") is None


def test_keys_tell_apart_what_results_depend_on() -> None:
    assert key_of(size={"windows": 2}, model="a") == key_of(model="a", size={"windows": 2})
    assert key_of(size={"windows": 2}, model="a") != key_of(size={"windows": 3}, model="a")


def test_a_busy_machine_is_named_beside_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_hybrid.commands.report.running.load_average", lambda: 900.0)
    section = run_one(Counting("counts"), fake_context(tmp_path, Sessions()), ["report"])
    assert "load average 900.0" in " ".join(one.text for one in section.elements if isinstance(one, Note))
