"""With a budget that holds the context, policies that select give stock SGLang's greedy text under all switches.

So does policy hgca with a window that holds the context, or with a threshold that leaves no token out.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from in_process import greedy
from transformers import AutoTokenizer

from sglang_hybrid.policies.scout.tuning import FIRST_STEPS

PROMPT_TOKENS = (58, 187, 347)
STEPS = 12  # each row crosses a block boundary, with recalls before and after it
PREDICTIONS = ("prediction=none", "prediction=raw", "profile=random")
RECALLS, BONUSES = (0, 2), (0, 2)


def combination(prediction: str, recall: int, bonus: int) -> list[str]:
    return [prediction, f"scout.recall_interval={recall}", f"scout.resident_bonus={bonus}"]


# Half of all combinations, for make test: every recall interval and every prediction meets both bonuses.
PAIRS = [
    combination(prediction, RECALLS[number % 2], BONUSES[(number + other) % 2])
    for number, prediction in enumerate(PREDICTIONS)
    for other in range(2)
]
# min_miss_attention changes nothing in a step without misses, whatever the other switches are: one combination each.
NO_LEAST = [[prediction, "scout.recall_interval=2", "scout.min_miss_attention=0"] for prediction in PREDICTIONS]
PAPER = [["policy=scoutattention", prediction, "scoutattention.recall_interval=2"] for prediction in PREDICTIONS]
# a window above the context, and a window below it with a threshold that leaves nothing out
HGCA = [["policy=hgca"], ["policy=hgca", "hgca.window_tokens=64", "hgca.beta=0"]]
# The session starts with policy infinigen, because the pool must keep partial keys from prefill on.
INFINIGEN = [["policy=infinigen", prediction, "infinigen.alpha=1e9"] for prediction in PREDICTIONS]
INFINIGEN.append(["policy=infinigen", "prediction=raw", "infinigen.alpha=1e9", "infinigen.unit=blocks"])
ALL = [combination(*switches) for switches in itertools.product(PREDICTIONS, RECALLS, BONUSES)]
COMBINATIONS = {
    "pairs": [*PAIRS, NO_LEAST[0], PAPER[1], *HGCA, INFINIGEN[1]],
    "others": [
        *(one for one in ALL if one not in PAIRS),
        *NO_LEAST[1:],
        PAPER[0],
        PAPER[2],
        INFINIGEN[0],
        *INFINIGEN[2:],
    ],
}


class Texts:
    """Greedy tokens of stock and of groups of COMBINATIONS. Each group is computed on demand, in its own process."""

    def __init__(self, model: Path) -> None:
        self._model = model
        ids = AutoTokenizer.from_pretrained(model).encode("\n\n".join(topics[key] for key in sorted(topics)[:40]))
        self._prompts = [ids[500 * n : 500 * n + tokens] for n, tokens in enumerate(PROMPT_TOKENS, 1)]
        # random prompts have no likely continuation: their tokens change with any block that is left out
        random = torch.Generator().manual_seed(0)
        self._prompts += [torch.randint(1000, 40000, (300,), generator=random).tolist() for _ in range(2)]

    @functools.cached_property
    def stock(self) -> list[list[int]]:
        return greedy(self._model, "torch_native", self._prompts, STEPS, [[]])[0]

    @functools.cache  # noqa: B019
    def hybrid(self, which: str) -> list[list[list[int]]]:
        """Return tokens ``[settings][prompts][steps]`` of the group ``which``.

        "small budget" shares the process of "pairs": a process takes longer to start than to compute its tokens.
        """
        if which == "small budget":
            return self.hybrid("pairs")[len(COMBINATIONS["pairs"]) :]
        settings = [["budget_tokens=2048", *one] for one in COMBINATIONS[which]]
        if which == "pairs":
            settings += [["budget_tokens=128", prediction] for prediction in PREDICTIONS]
        return greedy(self._model, "hybrid", self._prompts, STEPS, settings, ["--hybrid=policy=infinigen"])


@pytest.fixture(scope="module")
def texts(model: Path) -> Texts:
    return Texts(model)


@pytest.mark.parametrize(
    ("which", "number"),
    [
        pytest.param(which, number, id=" ".join(one), marks=[] if which == "pairs" else pytest.mark.full)
        for which, combinations in COMBINATIONS.items()
        for number, one in enumerate(combinations)
    ],
)
def test_the_text_is_stocks(texts: Texts, which: str, number: int) -> None:
    assert texts.hybrid(which)[number] == texts.stock


@pytest.mark.parametrize("number", range(len(PREDICTIONS)), ids=PREDICTIONS)
def test_the_first_steps_are_stocks_with_a_small_budget_too(texts: Texts, number: int) -> None:
    """The first FIRST_STEPS steps attend to everything. One such step is too few, above all for random prompts."""
    assert STEPS <= FIRST_STEPS
    assert texts.hybrid("small budget")[number] == texts.stock
