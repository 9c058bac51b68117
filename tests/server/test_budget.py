"""A budget below the context costs little on ordinary text: perplexity of decode steps behind 6,000-token prompts.

The places are spread evenly over the text. There are places where it costs much, such as token 2,000, where the model
copies from far back: see "Selection" in docs/design.md and bench/results/perplexity-copying.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "perplexity.py"


def test_perplexity_at_a_budget_of_1024_is_within_10_percent_of_full_attention(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "perplexity.json"
    settings = ("--windows", "3", "--prompt-tokens", "6000", "--decode-tokens", "64", "--budget", "1024")
    subprocess.run([sys.executable, str(SCRIPT), "--model-path", str(model), *settings, "--out", str(out)], check=True)
    measured = json.loads(out.read_text())
    with capsys.disabled():
        print(f"\nperplexity: full {measured['full']:.3f}, scout {measured['scout']:.3f} ({measured['change']:+.2%})")
    assert len(measured["places"]) == 3
    assert abs(measured["change"]) < 0.10
