"""``make test-ipex``, as far as it can be tested on machines for which Intel's extension does not exist."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import check_ipex
import pytest
from check_ipex import Trial
from installers import InstallError, Pip

ROOT = Path(__file__).resolve().parents[2]
TINY = "--pool 4MiB --threads 1 --blocks 8 --dtypes bfloat16 --variants portable --seconds 0.01"


@pytest.fixture
def here(tmp_path: Path) -> Trial:
    """Return a trial of provider ``torch``, with this environment, in place of ``ipex``."""
    return Trial("torch", Path(sys.executable), tmp_path / "made" / "bench.json")


@pytest.mark.parametrize(
    ("machine", "python", "reason"),
    [
        ("x86_64", (3, 11), None),
        ("x86_64", (3, 12), None),
        ("aarch64", (3, 11), "exists for x86_64 only, and this machine is aarch64"),
        ("x86_64", (3, 13), "no IPEX 2.8.0 for Python 3.13"),
    ],
)
def test_where_the_extension_does_not_exist_one_is_told_why(
    machine: str, python: tuple[int, int], reason: str | None
) -> None:
    said = check_ipex.unsupported(machine, python)
    assert said is None if reason is None else reason in str(said)


def test_a_machine_without_the_extension_ends_well_and_sets_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.delenv(check_ipex.STAND_IN, raising=False)
    monkeypatch.setattr(sys, "argv", ["check_ipex.py", "--venv", str(tmp_path / "venv")])
    check_ipex.main()
    assert capsys.readouterr().out.startswith("skipped: Intel's extension for PyTorch exists for x86_64 only")
    assert not (tmp_path / "venv").exists()


def test_the_environment_gets_the_extension_without_cuda_and_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    program = tmp_path / "pip"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    program.chmod(0o755)

    def choose(python: Path, requirements: list[str], without_cuda: bool) -> tuple[Pip, str]:
        assert without_cuda and python.exists()
        asked.append(tuple(requirements))
        return Pip([str(program)]), "by pip"

    monkeypatch.setattr(check_ipex, "choose", choose)
    monkeypatch.setattr(check_ipex, "pip_for", lambda python: [str(program)])
    monkeypatch.setattr("build_wheel.build", lambda out, python: [out / "s.tar.gz", out / "w.whl"])
    trial = Trial("ipex", tmp_path / "venv" / "bin" / "python", tmp_path / "bench.json")
    assert trial.set_up() == "by pip"
    assert asked[0][-1] == f"-r{ROOT / 'requirements' / 'ipex.txt'}" and "msgspec" in asked[0]
    packages, wheel = (tmp_path / "asked").read_text().splitlines()
    assert "requirements/ipex.txt" in packages
    assert "--no-deps" in wheel and wheel.endswith("w.whl")
    assert trial.steps()[0].what == "the worker's environment"


def test_the_requirements_are_those_that_the_check_speaks_of() -> None:
    lines = (ROOT / "requirements" / "ipex.txt").read_text().splitlines()
    assert 'intel-extension-for-pytorch==2.8.0; platform_machine == "x86_64"' in lines


def test_a_provider_that_cannot_be_loaded_says_why(here: Trial) -> None:
    with pytest.raises(InstallError) as failed:
        Trial("ipex", here.python, here.out).load()
    assert "provider ipex cannot be loaded" in failed.value.output


def test_answers_are_compared_by_the_test_of_workers_started_by_hand(
    here: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[list[str], Mapping[str, str] | None]] = []

    def run(command: list[str], environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        called.append((command, environment))
        return "..\n2 passed in 1 s\n"

    monkeypatch.setattr(check_ipex, "run", run)
    assert here.compare() == "2 passed in 1 s"
    ((command, environment),) = called
    assert Path(command[-1]).is_file()
    assert environment == {
        "SGLANG_HYBRID_TEST_WORKER_PYTHON": sys.executable,
        "SGLANG_HYBRID_TEST_WORKER_PROVIDER": "torch",
    }
    source = Path(command[-1]).read_text()
    assert all(name in source for name in environment)


def test_a_provider_that_was_not_measured_is_a_failure(here: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_ARGS", TINY)
    with pytest.raises(InstallError) as failed:
        Trial("ipex", here.python, here.out).measure()
    assert "provider ipex was not measured for bfloat16" in failed.value.output
    result = json.loads(here.out.read_text())
    assert result["torch"] and result["attention"] and not result["ipex"]


@pytest.mark.full
def test_a_provider_is_loaded_and_has_a_row_beside_native(here: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_ARGS", TINY)
    assert here.load().startswith("torch ")
    assert "native is" in here.measure()


def test_a_torch_with_cuda_is_taken_only_where_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch on PyPI for x86_64 has CUDA."""
    asked: list[bool] = []

    def choose(python: Path, requirements: list[str], without_cuda: bool) -> tuple[Pip, str]:
        asked.append(without_cuda)
        raise InstallError(["uv"], "would install torch with CUDA packages")

    monkeypatch.setattr(check_ipex, "choose", choose)
    for any_torch in (False, True):
        with pytest.raises(InstallError):
            Trial("ipex", tmp_path / "venv" / "bin" / "python", tmp_path / "bench.json", any_torch).set_up()
    assert asked == [True, False]
    command = ["make", "--dry-run", "test-ipex", "INSTALL=--device cpu --any-torch"]
    dry = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "tools/check_ipex.py --any-torch;" in dry.stdout


def test_the_make_target_skips_here_or_is_for_this_machine() -> None:
    dry = subprocess.run(["make", "--dry-run", "test-ipex"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "tools/check_ipex.py" in dry.stdout
