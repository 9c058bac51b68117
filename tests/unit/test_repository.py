"""Files for GitHub and for citations are valid, and name commands, files and versions of this checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_hybrid import __version__
from sglang_hybrid.cli import COMMANDS
from sglang_hybrid.commands.doctor.software import PYTHONS

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
RUNNERS = {"ubuntu-24.04": "x86_64", "ubuntu-24.04-arm": "aarch64"}
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug_report.yml", "feature_request.yml")],
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def load(path: Path) -> dict[Any, Any]:
    content: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in load(path)["jobs"].values():
        yield from job["steps"]


def job(workflow: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = load(GITHUB / "workflows" / f"{workflow}.yml")["jobs"][name]
    return found


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_for_other_programs_have_the_fields_that_these_know(schema: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, *SCHEMAS[schema]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="there is no actionlint on the PATH")
def test_actionlint_finds_nothing_in_the_workflows() -> None:
    subprocess.run(["actionlint", *WORKFLOWS], check=True)


# -- workflows ---------------------------------------------------------------------------------------------------------


def test_ci_runs_what_a_person_runs_on_every_python_and_both_architectures() -> None:
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    test = job("ci", "test")
    assert [step["run"] for step in test["steps"] if "run" in step] == [".ci/run"]
    (first, (major, end)) = PYTHONS
    pythons = [f"{major}.{minor}" for minor in range(first[1], end)]
    assert test["strategy"]["matrix"] == {"os": list(RUNNERS), "python": pythons}
    # YAML 1.1 reads the key "on" as True
    assert {"push", "pull_request"} <= set(load(GITHUB / "workflows" / "ci.yml")[True])


@each_workflow
def test_every_target_file_and_command_that_a_workflow_names_exists(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for step in steps(path) for line in step.get("run", "").splitlines()]
    assert lines
    for line in lines:
        assert set(re.findall(r"\bmake ([\w-]+)", line)) <= targets, line
        assert all((ROOT / name).is_file() for name in re.findall(r"(?:^| )((?:tools|\.ci)/[\w./-]+)", line)), line
        assert {name for name in re.findall(r"\bsglang-hybrid (\w[\w-]*)", line)} <= set(COMMANDS), line
    for glob in (load(path)[True].get("pull_request") or {}).get("paths", []):
        assert list(ROOT.glob(glob)), glob


@each_workflow
def test_actions_are_pinned_by_major_version(path: Path) -> None:
    used = {step["uses"] for step in steps(path) if "uses" in step}
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", action) for action in used), used


@each_workflow
def test_a_workflow_may_read_and_nothing_else_and_has_no_secrets(path: Path) -> None:
    content = load(path)
    assert content["permissions"] == {"contents": "read"}
    for name, one in content["jobs"].items():
        if "permissions" in one:
            assert (path.stem, name, one["permissions"]) == ("release", "publish", {"id-token": "write"})
        assert "timeout-minutes" in one
    assert "secrets." not in path.read_text()
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        # the shell would run what the name of a branch or a title contains
        assert "github." not in step.get("run", "")


def test_a_release_is_built_tried_and_published_from_tags_only() -> None:
    built = job("release", "build")
    assert {(one["os"], one["architecture"]) for one in built["strategy"]["matrix"]["include"]} == set(RUNNERS.items())
    assert built["container"].startswith("quay.io/pypa/manylinux_2_28_")
    tried = job("release", "smoke")
    assert {one["os"]: one["architecture"] for one in tried["strategy"]["matrix"]["include"]} == RUNNERS
    assert tried["strategy"]["matrix"]["os"] == list(RUNNERS)
    assert any("tools/smoke_wheel.py" in step.get("run", "") for step in tried["steps"])
    publish = job("release", "publish")
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(publish["needs"]) == {"smoke", "sdist"}
    assert tried["needs"] == job("release", "sdist")["needs"] == "build"


# -- issues, citation, security ----------------------------------------------------------------------------------------


def test_a_bug_report_asks_for_the_archive_of_a_command_that_exists() -> None:
    text = (GITHUB / "ISSUE_TEMPLATE" / "bug_report.yml").read_text()
    assert set(re.findall(r"`sglang-hybrid ([\w-]+)", text)) == {"report-problem"} <= set(COMMANDS)


def test_the_citation_has_our_version_and_the_papers() -> None:
    citation = load(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == __version__ == project["version"]
    assert citation["license"] == project["license"]
    assert citation["authors"] == [{"name": "The sglang-hybrid authors"}]
    assert [entry["title"].partition(":")[0] for entry in citation["references"]] == [
        "ScoutAttention",
        "HGCA",
        "HCAttention",
    ]
    for entry in citation["references"]:
        (identifier,) = entry["identifiers"]
        assert entry["url"] == f"https://arxiv.org/abs/{identifier['value'].removeprefix('arXiv:')}"
        assert all(set(author) == {"given-names", "family-names"} for author in entry["authors"])


def test_the_security_policy_names_commands_and_rules_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`sglang-hybrid ([\w-]+)", text)) <= set(COMMANDS)
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["select"]
    assert {"S102", "S104", "S301"} <= set(rules)  # exec, wildcard addresses, pickle
    assert all(len(line) <= 140 for line in text.splitlines())
