"""``sglang-hybrid doctor`` about versions, settings, hooks and the CPU library."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from doctor_machines import H200, machine
from packaging.specifiers import SpecifierSet

from sglang_hybrid.commands.doctor import software
from sglang_hybrid.commands.doctor.machine import CommandError
from sglang_hybrid.commands.doctor.report import Status
from sglang_hybrid.ops.cpu import NativeError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_HYBRID_CONFIG", "SGLANG_HYBRID_SET", "SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG"):
        monkeypatch.setenv(name, "")


# -- versions ----------------------------------------------------------------------------------------------------------


def test_the_pythons_are_those_of_the_package() -> None:
    said = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    (first, end) = (f"{major}.{minor}" for major, minor in software.PYTHONS)
    assert said == SpecifierSet(f">={first},<{end}")


def test_another_python_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.python(machine(tmp_path)).status is Status.OK
    monkeypatch.setattr(software, "running_python", lambda: (3, 13))
    found = software.python(machine(tmp_path))
    assert (found.status, found.to_do) == ("problem", "Install Python 3.11 or 3.12 and set up again.")


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.5.17", "ok"), ("0.5.23.post1", "ok"), ("0.5.24", "problem"), ("0.4.9", "problem"), (None, "problem")],
)
def test_sglang_must_be_one_that_was_tested(version: str | None, status: str, tmp_path: Path) -> None:
    found = software.sglang(machine(tmp_path, version=lambda _package: version))
    assert found.status == status
    assert found.status is Status.OK or "pip install sglang==0.5.23" in found.to_do


def test_a_gpu_host_is_told_to_install_the_sglang_that_was_tried_on_a_gpu(tmp_path: Path) -> None:
    assert "sglang==0.5.17" in software.sglang(machine(tmp_path, H200, version=lambda _: "0.4.9")).to_do


def test_an_untested_sglang_that_the_environment_allows_gets_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG", "1")
    assert software.sglang(machine(tmp_path, version=lambda _: "0.6.0")).status is Status.ADVICE


def test_a_missing_torch_is_a_problem(tmp_path: Path) -> None:
    assert software.torch(machine(tmp_path, version=lambda _: None)).status is Status.PROBLEM
    assert software.torch(machine(tmp_path, version=lambda _: "2.13.0")).found == "torch 2.13.0"


@pytest.mark.parametrize(("version", "status"), [("0.6.1", "ok"), ("0.5.0", "advice"), (None, "problem")])
def test_flashinfer_should_be_the_version_that_sglang_asks_for(
    version: str | None, status: str, tmp_path: Path
) -> None:
    asked = ["torch==2.9", "flashinfer_python==0.6.1", "pytest; extra == 'test'"]
    found = software.flashinfer(machine(tmp_path, H200, version=lambda _: version, requirements=lambda _: asked))
    assert found.status == status
    assert found.status is Status.OK or "pip install 'flashinfer-python==0.6.1'" in found.to_do


def test_versions_are_reported_with_null_for_what_is_missing(tmp_path: Path) -> None:
    found = software.versions(machine(tmp_path, version={"torch": "2.13.0"}.get))
    assert (found["torch"], found["sglang"]) == ("2.13.0", None)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_of_the_environment_are_checked_against_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert software.check_settings(machine(tmp_path)).found == "all settings have their defaults"
    monkeypatch.setenv("SGLANG_HYBRID_SET", '["budget_tokens=1024"]')
    assert software.check_settings(machine(tmp_path)).found == "the environment sets budget_tokens"
    monkeypatch.setenv("SGLANG_HYBRID_SET", '["worker_threads=99"]')
    found = software.check_settings(machine(tmp_path, cpus=8))
    assert found.status is Status.PROBLEM
    assert "must be auto, or 1 to 8" in found.found


def test_settings_that_cannot_be_read_leave_the_other_checks_their_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_SET", '["polcy=full"]')
    assert "did you mean policy?" in software.check_settings(machine(tmp_path)).found
    assert machine(tmp_path).config.policy == "scout"


# -- CPU library and hooks ---------------------------------------------------------------------------------------------


def test_a_cpu_library_that_is_not_built_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NativeError("the CPU kernels cannot be loaded")

    monkeypatch.setattr(software, "library", missing)
    found = software.cpu_library(machine(tmp_path))
    assert found.status is Status.PROBLEM
    assert "tools/build_native.py" in found.to_do


def test_hooks_are_those_that_the_command_check_finds(tmp_path: Path) -> None:
    def check(command: Sequence[str]) -> str:
        assert command == (sys.executable, "-m", "sglang_hybrid.cli", "check")
        return "sglang 0.5.23: all hooks of sglang-hybrid 0.2.0 are in place\n  after   a.b\n  around  c.d\n"

    assert software.hooks(machine(tmp_path, run=check)).found == "SGLang takes all 2 hooks"


def test_a_hook_that_does_not_fit_is_a_problem_with_its_name(tmp_path: Path) -> None:
    def check(_command: Sequence[str]) -> str:
        raise CommandError("sglang-hybrid: sglang 0.5.23 did not take these hooks of sglang-hybrid: a.b")

    found = software.hooks(machine(tmp_path, run=check))
    assert found.status is Status.PROBLEM
    assert "a.b" in found.found
