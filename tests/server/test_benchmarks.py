"""SGLang's own benchmarks run with the plugin loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_server import DEVICE


@pytest.mark.parametrize("policy", ["scout"])
def test_bench_one_batch_runs_with_the_hybrid_backend(model: Path, tmp_path: Path, policy: str) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "sglang_hybrid.bench_one_batch", "--model-path", str(model), "--device", DEVICE,
            "--dtype", "float32", "--attention-backend", "hybrid", "--hybrid", f"policy={policy}", "--hybrid",
            "budget_tokens=128", "--hybrid", "host_memory=512MiB", "--batch-size", "2", "--input-len", "256",
            "--output-len", "4", "--result-filename", str(tmp_path / "result.jsonl"),
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Benchmark ..." in done.stdout
    assert '"batch_size": 2' in (tmp_path / "result.jsonl").read_text()
