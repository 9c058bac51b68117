"""A budget below the context costs little: perplexity of decode steps behind 6,000-token prompts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

from real_server import DEVICE

PROMPT_TOKENS = 6000
DECODED_TOKENS = 64
WINDOWS = 3  # evenly spread over the text
SCRIPT = Path(__file__).with_name("forced_perplexity.py")


def perplexity(model: Path, texts: Path, *hybrid: str) -> float:
    flags = [f"--model-path={model}", "--attention-backend=hybrid", f"--device={DEVICE}", "--dtype=float32"]
    settings = [f"--hybrid={setting}" for setting in (*hybrid, "host_memory=1GiB")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(texts), str(PROMPT_TOKENS), *flags, *settings],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("SCORES "))
    scores = [score for text in json.loads(line.removeprefix("SCORES ")) for score in text]
    return math.exp(-sum(scores) / len(scores))


def test_perplexity_at_a_budget_of_1024_is_within_10_percent_of_full_attention(
    model: Path, english: list[int], tmp_path: Path
) -> None:
    texts = tmp_path / "texts.json"
    starts = [len(english) * (n + 1) // (WINDOWS + 1) for n in range(WINDOWS)]
    texts.write_text(json.dumps([english[start : start + PROMPT_TOKENS + DECODED_TOKENS] for start in starts]))
    full = perplexity(model, texts, "policy=full")
    scout = perplexity(model, texts, "policy=scout", "budget_tokens=1024")
    print(f"perplexity: full {full:.3f}, scout at 1,024 of 6,000 tokens {scout:.3f} ({scout / full - 1:+.2%})")
    assert abs(scout / full - 1) < 0.10
