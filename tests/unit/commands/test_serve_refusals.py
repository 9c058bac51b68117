"""A real ``sglang-hybrid serve`` refuses at once what it cannot serve: status 2, few lines, no traceback."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = str(Path(sys.executable).with_name("sglang-hybrid"))
PROFILES = Path(__file__).parents[3] / "configs" / "profiles"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return directory


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def refusal(*arguments: str) -> str:
    """Return the output of a command that must refuse quickly.

    CPU time is checked, because it does not depend on the load of the machine.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stdout
    assert 1 <= len(done.stdout.splitlines()) <= 5, done.stdout
    assert "Traceback" not in done.stdout
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 3
    return done.stdout


def test_an_unknown_setting(model: Path) -> None:
    assert "did you mean policy?" in refusal("serve", "--model-path", str(model), "--hybrid", "polcy=full")


def test_an_impossible_value(model: Path) -> None:
    assert "must be a multiple of 32" in refusal("serve", "--model-path", str(model), "--hybrid", "budget_tokens=1000")


def test_more_host_memory_than_there_is(model: Path) -> None:
    assert "only" in refusal("serve", "--model-path", str(model), "--hybrid", "host_memory=900TiB")


def test_a_profile_of_another_model(model: Path) -> None:
    profile = PROFILES / "SmolLM2-135M-Instruct-2048.safetensors"
    said = refusal("serve", "--model-path", str(model), "--hybrid", f"profile={profile}")
    assert "layers: profile 30, served 2" in said


def test_a_profile_of_another_budget(model: Path) -> None:
    profile = PROFILES / "SmolLM2-135M-Instruct-1024.safetensors"
    assert "budget_tokens: profile 1024, served 2048" in refusal("serve", "--hybrid", f"profile={profile}")


def test_a_profile_that_does_not_exist_or_is_none(model: Path, tmp_path: Path) -> None:
    assert "no such file" in refusal("serve", "--model-path", str(model), "--hybrid", f"profile={tmp_path / 'no'}")
    other = tmp_path / "other"
    other.write_bytes(b"not a profile at all")
    assert "cannot be read" in refusal("serve", "--model-path", str(model), "--hybrid", f"profile={other}")


def test_a_codebook_that_does_not_exist(model: Path, tmp_path: Path) -> None:
    settings = ("--hybrid", "policy=hcattention", "--hybrid", f"hcattention.codebook={tmp_path / 'gone'}")
    said = refusal("serve", "--model-path", str(model), *settings)
    assert f"hcattention.codebook={tmp_path / 'gone'}: there is no such file; sglang-hybrid profile --codebook" in said


def test_a_model_path_that_does_not_exist(tmp_path: Path) -> None:
    assert "there is no model at" in refusal("serve", "--model-path", str(tmp_path / "missing"))


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    assert "no config.json" in refusal("serve", "--model-path", str(tmp_path))


def test_a_context_longer_than_the_models(model: Path) -> None:
    said = refusal("serve", "--model-path", str(model), "--context-length", "4096")
    assert "longer than the 512 tokens" in said


def test_a_busy_port(model: Path, busy_port: int) -> None:
    said = refusal("serve", "--model-path", str(model), "--port", str(busy_port))
    assert f"port {busy_port} of 127.0.0.1 is in use by process {os.getpid()}" in said
    assert len(said.splitlines()) == 1


def test_a_busy_port_of_a_config_file(model: Path, busy_port: int, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"model-path: {model}\nport: {busy_port}\n")
    assert "is in use" in refusal("serve", "--config", str(file))


def test_a_busy_port_of_the_router(model: Path, busy_port: int) -> None:
    assert "is in use" in refusal("pd", "--model-path", str(model), "--port", str(busy_port))


def test_the_module_refuses_as_the_command_does(model: Path, busy_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PROGRAM", sys.executable)
    flags = ("--model-path", str(model), "--port", str(busy_port))
    assert "is in use" in refusal("-m", "sglang_hybrid.launch_server", *flags)
