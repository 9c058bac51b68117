"""The package's own command line, without SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hybrid import cli, launch_server


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_HYBRID_CONFIG", "SGLANG_HYBRID_SET"):
        monkeypatch.setenv(name, "")


@pytest.fixture
def cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_server, "_has_gpu", lambda: False)
    monkeypatch.setattr(launch_server, "_default_model", lambda: Path("/models/Small"))


def test_config_prints_effective_values_and_their_sources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recent_blocks: 4\n")
    cli.main(["config", "--hybrid-config", str(file), "--hybrid", "budget_tokens=1024"])
    printed = capsys.readouterr().out
    assert "budget_tokens: 1024  # override" in printed
    assert f"recent_blocks: 4  # file {file}" in printed
    assert "policy: scout  # default" in printed


def test_config_ends_with_the_problem_when_a_setting_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["config", "--hybrid", "polcy=full"])
    assert "did you mean policy?" in str(ended.value)


def test_worker_hands_everything_after_it_to_the_worker(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr("cpu_worker.main.main", lambda arguments: given.append(arguments) or 3)
    with pytest.raises(SystemExit) as ended:
        cli.main(["worker", "--dir", "/tmp/x"])
    assert (given, ended.value.code) == ([["--dir", "/tmp/x"]], 3)


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["bench", "nothing"]])
def test_a_command_that_does_not_exist_is_answered_with_those_that_do(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "sglang-hybrid" in capsys.readouterr().err


def test_a_cpu_host_gets_device_dtype_backend_and_the_default_model(cpu_host: None) -> None:
    assert launch_server.with_defaults(["--port", "8000"]) == [
        "--port", "8000", "--attention-backend", "hybrid", "--model-path", "/models/Small",
        "--served-model-name", "Small", "--device", "cpu", "--dtype", "float32",
    ]  # fmt: skip


def test_what_is_given_is_kept(cpu_host: None) -> None:
    given = ["--model-path=X", "--dtype", "bfloat16", "--device=cpu", "--attention-backend", "torch_native"]
    assert launch_server.with_defaults(given) == given


def test_asking_for_help_prepares_no_model(cpu_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_server, "_default_model", lambda: pytest.fail("a model was prepared"))
    assert "--help" in launch_server.with_defaults(["--help"])
