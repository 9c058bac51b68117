"""A server calibrates its predictor at the first start with a model and reuses the calibration at the second."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_server import Server

# with a worker, misses are posted one layer ahead, by prediction
FLAGS = ("--hybrid", "profile=auto", "--hybrid", "worker=start", "--hybrid", "host_memory=512MiB")


@pytest.mark.full
def test_predictions_are_calibrated_once_and_texts_are_stocks(
    model: Path, stock_server: Server, english: list[int], tmp_path: Path
) -> None:
    cache, prompt = {"SGLANG_HYBRID_CACHE": str(tmp_path / "cache")}, english[300:900]
    texts = []
    for start, budget in (("first", 2048), ("second", 256)):
        flags = (*FLAGS, "--hybrid", f"budget_tokens={budget}")
        with Server(model, "hybrid", *flags, log=tmp_path / start, environment=cache) as server:
            texts.append(server.generate(prompt)["text"])
    assert texts[0] == stock_server.generate(prompt)["text"]
    assert texts[1]  # with a budget below the prompt, predictions select the blocks
    first, second = ((tmp_path / start).read_text() for start in ("first", "second"))
    reached = re.search(r"calibrated in .*queries (0\.\d+) .*without calibration (0\.\d+)", first)
    assert reached
    assert float(reached[1]) > max(0.95, float(reached[2]))
    assert "calibrated at an earlier start" in second
    assert "calibrating" not in second
    assert len(list((tmp_path / "cache/calibrations").iterdir())) == 1
