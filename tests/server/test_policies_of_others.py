"""Policies of other packages: the one in ``examples``, and one that an SGLang plugin registers at run time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from installed_package import installed
from real_server import Server

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/streaming_llm"
# Plugin that registers a policy which attends to everything and logs that it serves.
PLUGIN = """
import logging
from sglang_hybrid.policies.registry import register_policy

def register():
    try:
        @register_policy("everything", description="everything is attended to")
        def create(context):
            from sglang_hybrid.policies.full import FullPolicy
            logging.getLogger("sglang.srt.hybrid").warning("policy everything serves %d layers", context.layers)
            return FullPolicy()
    except ValueError:
        pass  # SGLang loads plugins more than once
"""


@pytest.fixture
def example(tmp_path: Path) -> dict[str, str]:
    return installed(tmp_path / "site", "streaming_llm", "sglang_hybrid.policies", "streaming_llm", EXAMPLE)


def settings(*given: str) -> list[str]:
    return [part for setting in given for part in ("--hybrid", setting)]


@pytest.mark.full
def test_the_example_is_served(
    model: Path, stock_server: Server, english: list[int], example: dict[str, str], tmp_path: Path
) -> None:
    flags = settings("policy=streaming_llm", "streaming_llm.window_tokens=256", "host_memory=512MiB")
    with Server(model, "hybrid", *flags, log=tmp_path / "log", environment=example) as server:
        within, beyond = english[500:700], english[2000:2600]
        for prompt in (within, beyond):
            prefilled = server.generate(prompt, new_tokens=1)["text"]
            assert prefilled == stock_server.generate(prompt, new_tokens=1)["text"]
        assert server.generate(within)["text"] == stock_server.generate(within)["text"]
        assert server.generate(beyond)["text"]  # beyond the window the text may differ from stock's
        assert "policy=streaming_llm" in server.log.read_text()


@pytest.mark.full
def test_a_policy_that_is_registered_at_run_time_is_served(
    model: Path, stock_server: Server, english: list[int], tmp_path: Path
) -> None:
    (tmp_path / "everything.py").write_text(PLUGIN)
    environment = installed(tmp_path / "site", "everything", "sglang.srt.plugins", "everything:register", tmp_path)
    flags = settings("policy=everything", "host_memory=512MiB")
    with Server(model, "hybrid", *flags, log=tmp_path / "log", environment=environment) as server:
        assert "policy everything serves" in server.log.read_text()
        prompt = english[300:600]
        assert server.generate(prompt)["text"] == stock_server.generate(prompt)["text"]


@pytest.mark.full
def test_the_example_is_evaluated_and_benchmarked(model: Path, example: dict[str, str], tmp_path: Path) -> None:
    program, environment = Path(sys.executable).with_name("sglang-hybrid"), os.environ | example
    text = ("--tasks", "text", "--windows", "1", "--prompt-tokens", "700", "--decode-tokens", "16")
    run = ("--run", "window: policy=streaming_llm streaming_llm.window_tokens=256")
    evaluate: list[str | Path] = [program, "eval", "--model-path", model, *text, *run, "--out", tmp_path / "eval"]
    subprocess.run(evaluate, check=True, env=environment, timeout=600)
    full, window = json.loads((tmp_path / "eval/eval.json").read_text())["runs"]
    assert 0 < window["kl_mean"] < 5
    assert window["perplexity"] != full["perplexity"]

    small = ("--batch-size", "1", "--input-len", "600", "--output-len", "4")
    bench: list[str | Path] = [
        program,
        "bench",
        "one_batch",
        "--model-path",
        model,
        *settings("policy=streaming_llm"),
        *small,
    ]
    done = subprocess.run(bench, capture_output=True, text=True, check=True, env=environment, timeout=600)
    assert "Decode." in done.stdout + done.stderr
