"""A budget below the context costs little on ordinary text: perplexity of decode steps behind long prompts.

Both lengths of prompts are six times the budget. The tests run in ``make test-full`` only: they compute for minutes.

The places that are measured are spread evenly over the text. Where the model copies from far back, a small budget
costs more: see docs/accuracy.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.parametrize(("prompt_tokens", "budget"), [("1500", "256"), ("6000", "1024")])
def test_perplexity_at_a_small_budget_is_within_10_percent_of_full_attention(
    prompt_tokens: str, budget: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Path(sys.executable).with_name("sglang-hybrid")
    text = ("--tasks", "text", "--windows", "3", "--prompt-tokens", prompt_tokens, "--decode-tokens", "64")
    run = ("--run", f"small: budget_tokens={budget} prediction=none")
    subprocess.run(
        [program, "eval", "--model-path", model, "--dtype", "float32", *text, *run, "--out", tmp_path], check=True
    )
    full, small = json.loads((tmp_path / "eval.json").read_text())["runs"]
    change = small["perplexity"] / full["perplexity"] - 1
    with capsys.disabled():
        print(f"\nperplexity: full {full['perplexity']:.3f}, budget {budget} {small['perplexity']:.3f} ({change:+.2%})")
    assert small["kl_mean"] > 0
    assert abs(change) < 0.10
