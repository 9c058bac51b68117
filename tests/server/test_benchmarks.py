"""SGLang's own benchmarks run with the plugin loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_server import DEVICE, run_module

COMMON = (
    "--device", DEVICE, "--dtype", "float32", "--attention-backend", "hybrid", "--hybrid", "budget_tokens=128",
    "--hybrid", "host_memory=512MiB",
)  # fmt: skip


@pytest.mark.full
def test_one_batch_runs_with_the_hybrid_backend(model: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.jsonl"
    run_module(
        "sglang_hybrid.bench_one_batch", "--model-path", str(model), *COMMON, "--batch-size", "2", "--input-len", "256",
        "--output-len", "4", "--result-filename", str(result),
    )  # fmt: skip
    assert json.loads(result.read_text().splitlines()[-1])["batch_size"] == 2


@pytest.mark.full
def test_one_batch_server_starts_a_server_with_the_hybrid_backend(model: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.jsonl"
    run_module(
        "sglang_hybrid.bench_one_batch_server", "--model-path", str(model), *COMMON, "--max-running-requests", "4",
        "--batch-size", "2", "--input-len", "64", "--output-len", "4", "--skip-warmup", "--dataset-name", "random-ids",
        "--result-filename", str(result),
    )  # fmt: skip
    assert json.loads(result.read_text().splitlines()[-1])["batch_size"] == 2


@pytest.mark.full
def test_offline_throughput_runs_an_engine_with_the_hybrid_backend(model: Path, tmp_path: Path) -> None:
    conversations = tmp_path / "conversations.json"
    turns = [{"from": "human", "value": "Tell me about rivers. " * 4}, {"from": "gpt", "value": "Water flows. " * 4}]
    conversations.write_text(json.dumps([{"id": str(n), "conversations": turns} for n in range(8)]))
    result = tmp_path / "result.jsonl"
    run_module(
        "sglang_hybrid.bench_offline_throughput", "--model-path", str(model), *COMMON, "--max-running-requests", "4",
        "--dataset-name", "random", "--dataset-path", str(conversations), "--num-prompts", "3", "--random-input-len",
        "32", "--random-output-len", "4", "--skip-warmup", "--result-filename", str(result),
    )  # fmt: skip
    assert json.loads(result.read_text().splitlines()[-1])["successful_requests"] == 3
