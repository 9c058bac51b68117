"""The throughput benchmark runs with real servers and a tiny model. Its numbers are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full  # starts two servers; tests/unit/bench/test_throughput.py tests the program's parts
ROOT = Path(__file__).parents[2]


def test_stock_and_hybrid_are_measured_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [
        sys.executable,
        "-m",
        "bench.throughput",
        "--quick",
        "--lengths",
        "512",
        "--out",
        str(out),
        "--hybrid",
        "worker=start",
    ]
    command += ["--model", str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(out.read_text())
    points = {one["configuration"]: one for one in result["points"]}
    assert set(points) == {"stock", "hybrid"}, result["notes"]
    for one in points.values():
        assert one["rows"] == one["capacity"]["rows"] > 1
        assert one["tokens_per_s"] > 0
        assert one["expected_tokens_share"] == 1.0
    assert any(name.startswith("sglang_hybrid_miss_rows") for name in points["hybrid"]["metrics"])
    assert result["speed_ups"][0]["length"] == 512
    assert (tmp_path / "result-throughput.png").is_file()
