"""The dtype that every entry point uses on a CPU. No server is started: the tests resolve command lines."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.commands.defaults import with_defaults
from sglang_hybrid.commands.pd import command_lines
from sglang_hybrid.integration import server_args
from sglang_hybrid.integration.session_flags import add_model_flags, session_flags

from test_server_args import LLAMA, write_model  # isort: skip

PORTS = command_lines.Ports(1, 2, 3, 4, 5)
Dtype = Callable[..., torch.dtype]


@pytest.fixture(autouse=True)
def cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("SGLANG_HYBRID_CONFIG", "SGLANG_HYBRID_SET", "SGLANG_HYBRID_LOAD_FILE"):
        monkeypatch.setenv(name, "")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the directory of a model that is stored in bfloat16, as most models are."""
    return write_model(tmp_path, LLAMA | {"torch_dtype": "bfloat16"})


@pytest.fixture
def dtype_of(model: Path) -> Dtype:
    def resolve(*flags: str) -> torch.dtype:
        from sglang.srt.server_args import prepare_server_args

        return dtype_in(prepare_server_args([*flags, "--skip-tokenizer-init"]))

    return resolve


def dtype_in(args: Any) -> torch.dtype:
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    assert args.device == "cpu"
    dtype: torch.dtype = server_args._model_config(args).dtype
    return dtype


def test_stock_launcher_with_the_backend(model: Path, dtype_of: Dtype) -> None:
    flags = ("--model-path", str(model), "--attention-backend", "hybrid")
    assert dtype_of(*flags, "--device", "cpu") == torch.float32
    assert dtype_of(*flags) == torch.float32  # the only device is chosen without the flag, too


def test_serve_and_our_launcher(model: Path, dtype_of: Dtype) -> None:
    assert dtype_of(*with_defaults(["--model-path", str(model)])) == torch.float32


def test_another_backend_in_our_launcher_is_compared_in_the_same_dtype(model: Path, dtype_of: Dtype) -> None:
    flags = with_defaults(["--model-path", str(model), "--attention-backend", "torch_native"])
    assert dtype_of(*flags) == torch.float32


def test_another_backend_in_the_stock_launcher_is_left_alone(
    model: Path, dtype_of: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_args, "_every_backend", False)
    flags = ("--model-path", str(model), "--attention-backend", "torch_native", "--device", "cpu")
    assert dtype_of(*flags) == torch.bfloat16


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_both_instances_of_pd(model: Path, dtype_of: Dtype, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = command_lines.Flags(both=["--model-path", str(model)])
    if role == "prefill":
        monkeypatch.setattr(server_args, "_every_backend", False)  # the prefill instance is a stock server
        line = command_lines.prefill(PORTS, flags, gpu=False)
    else:
        line = command_lines.decode(PORTS, flags, gpu=False)
    python, m, _module, *arguments = line
    assert (python, m) == (sys.executable, "-m")
    assert dtype_of(*arguments) == torch.float32


def test_eval_and_profile(model: Path, dtype_of: Dtype) -> None:
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    options = parser.parse_args(["--model-path", str(model), "--host-memory", "1GiB"])
    assert dtype_of(*session_flags(options, [])) == torch.float32


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("one_batch", "main"),
        ("offline_throughput", "throughput_test"),
        ("one_batch_server", "run_benchmark"),
    ],
)
def test_benchmarks_of_sglang(model: Path, name: str, runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = __import__(f"sglang.benchmark.{name}", fromlist=["cli_main"])
    seen: list[Any] = []
    monkeypatch.setattr(benchmark, runs, lambda args, _bench_args: seen.append(args))
    monkeypatch.setattr(sys, "argv", [name, "--model-path", str(model), "--skip-tokenizer-init"])
    runpy.run_module(f"sglang_hybrid.bench_{name}", run_name="__main__")
    (args,) = seen
    assert args.attention_backend == "hybrid"
    assert dtype_in(args) == torch.float32


def test_a_gpu_keeps_the_models_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = SimpleNamespace(device=None, dtype="auto")
    server_args._set_device_and_dtype(args)
    assert (args.device, args.dtype) == (None, "auto")


@pytest.mark.parametrize(("asked", "kept"), [("bfloat16", torch.bfloat16), ("half", torch.float16)])
@pytest.mark.parametrize("fast", [True, False], ids=["with instructions", "without"])
def test_another_dtype_is_kept_with_a_warning_where_it_is_slow(
    model: Path, dtype_of: Dtype, asked: str, kept: torch.dtype, fast: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(server_args, "multiplies_fast", lambda _dtype: fast)
    warnings: list[str] = []
    monkeypatch.setattr(server_args.logger, "warning", lambda text, *parts: warnings.append(text % parts))
    assert dtype_of("--model-path", str(model), "--attention-backend", "hybrid", "--dtype", asked) == kept
    if fast:
        assert warnings == []
    else:
        (warning,) = warnings
        assert f"--dtype {asked}" in warning
        assert "10 to 30 times as long as with float32" in warning
