"""``sglang-hybrid report`` with a tiny real model that has random weights and no tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

SMALLEST = (
    "windows=1", "prompt_tokens=288", "decode_tokens=20", "budget=192", "budgets=160,192", "ratio_steps=20",
    "fit_windows=2", "fit_tokens=128", "calibrates=1", "speed_lengths=64", "batches=1,2", "batch_length=64",
    "speed_budget=160", "speed_steps=2",
    "warm_steps=1", "rate_steps=8",
)  # fmt: skip


def report(model: Path, out: Path, *only: str) -> subprocess.CompletedProcess[str]:
    numbers = [word for number in SMALLEST for word in ("--set", number)]
    command = [
        "-m",
        "sglang_hybrid.cli",
        "report",
        "--model",
        str(model),
        "--out",
        str(out),
        "--size",
        "tiny",
        *numbers,
    ]
    return subprocess.run(
        [sys.executable, *command, "--device", "cpu", "--threads", "1", "--only", ",".join(only)],
        capture_output=True, text=True, check=False, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip


def test_a_report_measures_a_real_model_and_goes_on_from_its_results(tmp_path: Path) -> None:
    model, out = tiny_models.write_llama(tmp_path / "tiny-llama"), tmp_path / "out"
    done = report(model, out, "scout-ratio", "scout-ablation", "scout-cosines", "hc-needle", "hc-memory")
    assert done.returncode == 0, done.stderr + (out / "log" / "sessions.log").read_text()[-3000:]
    results = {path.stem: json.loads(path.read_text()) for path in (out / "results").glob("*.json")}
    ratios = {run["name"]: run for run in results["scout-ratio"]["result"]["runs"]}
    assert len(ratios["scoutattention"]["by_step"]) == 20
    runs = results["scout-ablation"]["result"]["runs"]
    assert runs[0]["perplexity"] > 1 and all(run["kl_mean"] > 0 for run in runs[1:])
    assert results["scout-ablation"]["result"]["refused"] == {}
    assert [layer["layer"] for layer in results["scout-cosines"]["result"]["layers"]] == [1, 2]
    page = (out / "report.html").read_text()
    assert "the model has no tokenizer to ask with" in page  # the page gives the reason for a skipped experiment
    assert page.count("<svg") == 4
    log = (out / "log" / "sessions.log").stat().st_size
    assert report(model, out, "scout-ratio", "scout-cosines").returncode == 0
    assert (out / "log" / "sessions.log").stat().st_size == log, "no model was loaded for results that were there"


@pytest.mark.full
def test_a_report_measures_the_speed_of_every_engine(tmp_path: Path) -> None:
    model, out = tiny_models.write_llama(tmp_path / "tiny-llama"), tmp_path / "out"
    done = report(model, out, "scout-length", "scout-batch", "scout-breakdown", "hgca-rate")
    assert done.returncode == 0, done.stderr + (out / "log" / "sessions.log").read_text()[-3000:]
    engines = {
        policy: json.loads((out / "results" / f"speed-{policy}.json").read_text())["engine"]
        for policy in ("stock", "full", "scout", "scoutattention")
    }
    assert engines["stock"].startswith("stock SGLang")
    assert engines["full"] == engines["scout"] == "native CPU kernels"
    assert engines["scoutattention"] == "plain torch"
