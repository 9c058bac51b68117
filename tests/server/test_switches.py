"""Whatever the switches of policy scout, a budget that holds the context gives stock SGLang's greedy text."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from transformers import AutoTokenizer

PROMPT_TOKENS = (40, 333, 900)
STEPS = 34  # crosses a block boundary behind every prompt
PREDICTIONS = (("prediction=none",), ("prediction=raw",), ("profile=random",))
COMBINATIONS = [
    [*prediction, f"recall_interval={recall}", f"selection={selection}", f"sticky_bonus={bonus}", f"attend={attend}"]
    for prediction, recall, selection, bonus, attend in itertools.product(
        PREDICTIONS, (0, 2), ("head", "layer"), (0, 2), ("resident", "selected")
    )
    # what is attended does not depend on who predicts: one of them is enough
    if attend == "resident" or prediction == ("prediction=raw",)
] + [
    # without misses there is nothing that these two change, whatever the others say: one each is enough
    [*prediction, "recall_interval=2", "lse_shift=false", "miss_share=0"]
    for prediction in PREDICTIONS
]


def greedy(model: Path, backend: str, prompts: list[list[int]], settings: list[list[str]]) -> list[list[list[int]]]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("greedy_texts.py")), str(model), backend],
        input=json.dumps({"prompts": prompts, "steps": STEPS, "settings": settings}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    tokens: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])["tokens"]
    return tokens


@pytest.fixture(scope="module")
def said(model: Path) -> tuple[list[list[int]], list[list[list[int]]]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.encode("\n\n".join(topics[key] for key in sorted(topics)[:40]))
    prompts = [ids[500 * n : 500 * n + tokens] for n, tokens in enumerate(PROMPT_TOKENS, 1)]
    settings = [["budget_tokens=2048", *combination] for combination in COMBINATIONS]
    return greedy(model, "torch_native", prompts, [[]])[0], greedy(model, "hybrid", prompts, settings)


@pytest.mark.parametrize("number", range(len(COMBINATIONS)), ids=[" ".join(one) for one in COMBINATIONS])
def test_the_text_is_stocks(said: tuple[list[list[int]], list[list[list[int]]]], number: int) -> None:
    stock, hybrid = said
    assert hybrid[number] == stock
