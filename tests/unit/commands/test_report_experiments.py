"""Experiments of ``sglang-hybrid report`` on made-up measurements: what they measure, draw and skip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_doubles import Sessions, fake_context

from sglang_hybrid.commands.report import paper_numbers
from sglang_hybrid.commands.report.content import Figure, Note, Section, Table
from sglang_hybrid.commands.report.context import STOCK
from sglang_hybrid.commands.report.experiments import EXPERIMENTS
from sglang_hybrid.commands.report.experiments.base import Experiment, settings_lines
from sglang_hybrid.commands.report.running import run_all, run_one
from sglang_hybrid.policies import registry

# policies that a registry may lack: the report uses those that are registered
ABSENT = ("hgca", "hcattention", "infinigen")


class Quiet:
    def __init__(self) -> None:
        self.ended: list[tuple[str, str]] = []

    def begins(self, name: str) -> None: ...

    def progress(self, text: str, part: float) -> None: ...

    def ends(self, name: str, status: str, seconds: float) -> None:
        self.ended.append((name, status))


@pytest.fixture
def with_all_policies(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Register all policies that a report knows; absent ones are copies of scoutattention. Return their names."""
    registry.policy_names()
    for name in ABSENT:
        if not registry.has_policy(name):
            monkeypatch.setitem(registry._policies, name, registry._policies["scoutattention"])
    return ("full", "hcattention", "hgca", "infinigen", "scout", "scoutattention")


def named(name: str) -> Experiment:
    return next(one for one in EXPERIMENTS if one.name == name)


def words_of(section: Section) -> str:
    return " ".join(element.text for element in section.elements if isinstance(element, Note))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_an_experiment_shows_a_figure_a_table_and_its_sources(
    experiment: Experiment, tmp_path: Path, with_all_policies: tuple[str, ...]
) -> None:
    context = fake_context(tmp_path, Sessions(), with_all_policies)
    context.codebooks = {"32 x 256": Path("/codebooks/a.safetensors")}
    section = run_one(experiment, context, ["sglang-hybrid", "report"])
    assert section.status == ("arithmetic" if experiment.by_arithmetic else "measured"), words_of(section)
    assert any(isinstance(element, Figure) for element in section.elements)
    assert any(isinstance(element, Table) for element in section.elements)
    assert section.command.endswith(f"--only {experiment.name}")
    for element in section.elements:
        if isinstance(element, Table):
            assert {len(row) for row in element.rows} <= {len(element.head)}
    if experiment.paper != "all":
        shown = [element.text for element in section.elements if isinstance(element, Note)]
        shown += [element.caption for element in section.elements if isinstance(element, Table)]
        assert f"{experiment.paper}, " in " ".join(shown), "a paper's number names its table, figure or section"


def test_names_of_experiments_are_unique_and_figures_are_named_after_them(
    tmp_path: Path, with_all_policies: tuple[str, ...]
) -> None:
    names = [one.name for one in EXPERIMENTS]
    assert len(set(names)) == len(names)
    context = fake_context(tmp_path, Sessions(), with_all_policies)
    sections = run_all(EXPERIMENTS, context, Quiet(), ["report"])
    figures = [element.name for one in sections for element in one.elements if isinstance(element, Figure)]
    assert len(set(figures)) == len(figures)
    assert all(figure in names for figure in figures)


def test_an_experiment_without_its_policy_is_skipped_and_says_so(tmp_path: Path) -> None:
    context = fake_context(tmp_path, Sessions())
    section = run_one(named("hgca-perplexity"), context, ["report"])
    assert section.status == "skipped"
    assert "policy hgca is not registered" in words_of(section)


def test_codebooks_are_asked_for_where_there_are_none(tmp_path: Path, with_all_policies: tuple[str, ...]) -> None:
    section = run_one(named("hc-codebook"), fake_context(tmp_path, Sessions(), with_all_policies), ["report"])
    assert section.status == "skipped"
    assert "--codebook FILE" in words_of(section)


def test_a_policy_that_is_not_there_is_named_beside_those_that_are(tmp_path: Path) -> None:
    section = run_one(named("policies"), fake_context(tmp_path, Sessions()), ["report"])
    assert section.status == "measured"
    assert "infinigen: the policy is not registered" in words_of(section)


def test_a_policy_that_keeps_codes_gets_a_model_that_was_started_for_it(
    tmp_path: Path, with_all_policies: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    coded = dataclasses.replace(registry._policies["scoutattention"], code_bytes=lambda _config, _shape: 8)
    monkeypatch.setitem(registry._policies, "infinigen", coded)
    sessions = Sessions()
    run_one(named("policies"), fake_context(tmp_path, sessions, with_all_policies), ["report"])
    changing = [session.load for session in sessions.started if session.load.engine == "any"]
    assert any("policy=infinigen" in load.settings for load in changing)


def test_speeds_of_a_policy_are_measured_once_for_all_experiments(tmp_path: Path) -> None:
    sessions = Sessions()
    context = fake_context(tmp_path, sessions)
    for name in ("scout-length", "scout-batch", "scout-breakdown"):
        run_one(named(name), context, ["report"])
    assert sessions.asked.count("speed") == 3  # stock, scout, scoutattention
    assert [session.load.engine for session in sessions.started] == ["stock", "served", "served"]


def test_a_model_that_is_loaded_already_is_asked_again(tmp_path: Path) -> None:
    sessions = Sessions()
    context = fake_context(tmp_path, sessions)
    for name in ("scout-ratio", "scout-accuracy", "scout-cosines"):
        run_one(named(name), context, ["report"])
    assert len(sessions.started) == 1
    sessions.started[0].is_alive = False  # the session crashed
    run_one(named("scout-ablation"), context, ["report"])
    assert len(sessions.started) == 2


def test_speed_without_a_gpu_comes_with_a_warning(tmp_path: Path) -> None:
    section = run_one(named("scout-length"), fake_context(tmp_path, Sessions()), ["report"])
    assert "no GPU here" in words_of(section)


def test_the_papers_grids_are_complete() -> None:
    for _, grid in paper_numbers.HGCA_PERPLEXITY.values():
        assert len(grid) == len(paper_numbers.HGCA_RATIOS)
        assert {len(row) for row in grid} == {len(paper_numbers.HGCA_BETAS)}


def test_settings_of_every_run_are_listed(tmp_path: Path) -> None:
    context = fake_context(tmp_path, Sessions())
    context.size = context.size.changed(["calibrates=1"])
    section = run_one(named("scout-ablation"), context, ["report"])
    assert any("prediction=calibrated profile=auto" in line for line in section.settings)
    lines: Any = run_one(named("scout-length"), fake_context(tmp_path, Sessions()), ["report"]).settings
    assert any(line.startswith(f"{STOCK}: ") for line in lines)


def test_settings_name_files_without_their_folders() -> None:
    (line,) = settings_lines(
        [{"name": "a", "settings": ["hcattention.codebook=/home/me/a.safetensors", "policy=hgca"]}]
    )
    assert line == "a: hcattention.codebook=a.safetensors policy=hgca"
