"""Whatever the switches of policy scout, a budget that holds the context gives stock SGLang's greedy text."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from in_process import greedy
from transformers import AutoTokenizer

PROMPT_TOKENS = (58, 187, 507)
STEPS = 12  # crosses a block boundary behind every prompt, with recalls before and after it
PROCESSES = 2  # that share the combinations: a second thread would speed up neither of them
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


@pytest.fixture(scope="module")
def said(model: Path) -> tuple[list[list[int]], list[list[list[int]]]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.encode("\n\n".join(topics[key] for key in sorted(topics)[:40]))
    prompts = [ids[500 * n : 500 * n + tokens] for n, tokens in enumerate(PROMPT_TOKENS, 1)]
    settings = [["budget_tokens=2048", *combination] for combination in COMBINATIONS]
    parts = [settings[n::PROCESSES] for n in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        stock = pool.submit(greedy, model, "torch_native", prompts, STEPS, [[]])
        hybrid: list[list[list[int]]] = [[]] * len(settings)
        for n, tokens in enumerate(pool.map(lambda part: greedy(model, "hybrid", prompts, STEPS, part), parts)):
            hybrid[n::PROCESSES] = tokens
    return stock.result()[0], hybrid


@pytest.mark.parametrize("number", range(len(COMBINATIONS)), ids=[" ".join(one) for one in COMBINATIONS])
def test_the_text_is_stocks(said: tuple[list[list[int]], list[list[list[int]]]], number: int) -> None:
    stock, hybrid = said
    assert hybrid[number] == stock
