"""The command line of sglang-hybrid, without SGLang."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hybrid import cli
from sglang_hybrid.commands import bench, checkout, defaults
from sglang_hybrid.commands.arguments import Refused
from sglang_hybrid.commands.model import DefaultModelError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_HYBRID_CONFIG", "SGLANG_HYBRID_SET"):
        monkeypatch.setenv(name, "")


@pytest.fixture
def default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "_directory_of", lambda name: Path("/models", name or "Small"))
    monkeypatch.setattr(defaults, "gpu_names", lambda: ("NVIDIA H200",))


def test_config_prints_effective_values_and_their_sources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recent_blocks: 4\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["config", "--hybrid-config", str(file), "--hybrid", "budget_tokens=1024"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "budget_tokens: 1024  # override" in printed
    assert f"recent_blocks: 4  # file {file}" in printed
    assert "policy: scout  # default" in printed


def test_config_ends_with_the_problem_when_a_setting_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["config", "--hybrid", "polcy=full"])
    assert ended.value.code == 2
    assert "did you mean policy?" in capsys.readouterr().err


def test_worker_hands_everything_after_it_to_the_worker(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []

    def worker(arguments: list[str]) -> int:
        given.append(arguments)
        return 3

    monkeypatch.setattr("cpu_worker.main.main", worker)
    with pytest.raises(SystemExit) as ended:
        cli.main(["worker", "--dir", "/tmp/x"])
    assert (given, ended.value.code) == ([["--dir", "/tmp/x"]], 3)


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [([], "serve"), (["srve"], "did you mean serve?"), (["bench"], "one_batch"), (["bench", "nothing"], "one_batch")],
)
def test_a_command_that_does_not_exist_is_answered_with_those_that_do(
    arguments: list[str], listed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert listed in capsys.readouterr().err


HEAVY = ("torch", "sglang", "transformers", "numpy")
# SGLang's parser answers --help of serve, a separate process answers --help of chaos.
OWN_HELP = [[name, "--help"] for name in cli.COMMANDS if name not in ("serve", "chaos")]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["config"], ["bench", "--help"], ["frobnicate"], *OWN_HELP], ids=" ".join
)
def test_help_and_config_answer_without_loading_torch_or_sglang(arguments: list[str]) -> None:
    look = (
        "import sys\nfrom sglang_hybrid import cli\ntry:\n    cli.main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', *({set(HEAVY)!r} & sys.modules.keys()))"
    )
    # a generous timeout: a busy machine takes several times as long as an idle one
    done = subprocess.run(
        [sys.executable, "-c", look, *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    assert "usage: sglang-hybrid" in done.stdout + done.stderr or arguments == ["config"]
    assert done.stdout.splitlines()[-1] == "LOADED"


@pytest.mark.parametrize("command", [["chaos"], ["bench", "worker"]], ids=" ".join)
def test_programs_of_the_repository_run_in_a_checkout_from_any_folder(command: list[str], tmp_path: Path) -> None:
    called = [sys.executable, "-m", "sglang_hybrid.cli", *command, "--help"]
    done = subprocess.run(called, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith(f"usage: sglang-hybrid {' '.join(command)}")


def test_programs_of_the_repository_are_not_in_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    assert checkout.main(["--minutes", "1"]) == bench.main(["worker"]) == 2
    assert capsys.readouterr().err.count("call it in a checkout") == 2


def test_every_command_has_a_module_with_a_main_function() -> None:
    for name, command in cli.COMMANDS.items():
        assert callable(importlib.import_module(command.module).main), name
        assert f"  {name} " in cli.help_text()


def test_serve_fills_in_the_backend_and_the_default_model(default_model: None) -> None:
    assert defaults.with_defaults(["--port", "8000"]) == [
        "--port", "8000", "--attention-backend", "hybrid", "--model-path", "/models/Small",
        "--served-model-name", "Small",
    ]  # fmt: skip


def test_a_server_without_a_gpu_sleeps_when_idle_and_is_patient(
    default_model: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = ["--attention-backend", "hybrid", "--sleep-on-idle", "--watchdog-timeout", "1800"]
    assert defaults.with_defaults(["--model=X", "--device", "cpu"])[3:] == added
    monkeypatch.setattr(defaults, "gpu_names", tuple)
    assert defaults.with_defaults(["--model=X"])[1:] == added
    given = ["--model=X", "--attention-backend=hybrid", "--sleep-on-idle", "--watchdog-timeout=300"]
    assert defaults.with_defaults(given) == given


def test_what_is_given_is_kept(default_model: None) -> None:
    given = ["--model-path=X", "--dtype", "bfloat16", "--device=cuda", "--attention-backend", "torch_native"]
    assert defaults.with_defaults(given) == given


@pytest.mark.parametrize("flag", [["--model-path", "qwen2.5-coder-1.5b"], ["--model=qwen2.5-coder-1.5b"]])
def test_the_name_of_a_known_model_becomes_its_directory(default_model: None, flag: list[str]) -> None:
    directory = ["--model-path", "/models/qwen2.5-coder-1.5b"]
    assert defaults.with_model([*flag, "--port", "8000"]) == [
        "--port", "8000", *directory, "--served-model-name", "qwen2.5-coder-1.5b",
    ]  # fmt: skip
    named = ["--served-model-name", "coder"]
    assert defaults.with_model([*named, *flag]) == [*named, *directory]


def test_a_directory_comes_before_a_known_model_of_that_name(
    default_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qwen2.5-coder-1.5b").mkdir()
    monkeypatch.chdir(tmp_path)
    given = ["--model-path", "qwen2.5-coder-1.5b"]
    assert defaults.with_model(given) == given


def test_the_name_of_a_known_model_may_stand_in_sglangs_config_file(default_model: None, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model-path: qwen2.5-coder-1.5b\nserved-model-name: coder\n")
    given = ["--config", str(file)]
    # the command line is read after the file and overrides it
    assert defaults.with_model(given) == [*given, "--model-path", "/models/qwen2.5-coder-1.5b"]


def test_a_model_that_cannot_be_prepared_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Path:
        raise DefaultModelError("There is no network.")

    monkeypatch.setattr(defaults, "find_model", fail)
    with pytest.raises(Refused, match=r"^There is no network\.$"):
        defaults.with_defaults(["--model-path", "qwen2.5-coder-1.5b"])


def test_sglangs_benchmarks_get_the_backend_and_the_model(default_model: None) -> None:
    assert bench.with_defaults(["--batch-size", "2"]) == [
        "--batch-size", "2", "--attention-backend", "hybrid", "--model-path", "/models/Small",
        "--served-model-name", "Small",
    ]  # fmt: skip
    given = ["--model-path=X", "--attention-backend=torch_native"]
    assert bench.with_defaults(given) == given


def test_asking_for_help_prepares_no_model(default_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "_directory_of", lambda name: pytest.fail("a model was prepared"))
    assert "--help" in defaults.with_defaults(["--help"])
