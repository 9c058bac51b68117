"""Writes conversations in ShareGPT's format, with lengths like ShareGPT's, for hosts without the data set.

Lengths are lognormal with the means of ShareGPT, 161 tokens in and 338 out (vLLM's paper, figure 11, arXiv 2309.06180),
and are cut at 2,048. Text is random tokens of the model's tokenizer.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

MEAN_INPUT, MEAN_OUTPUT = 161, 338
_SPREAD_INPUT, _SPREAD_OUTPUT = 1.2, 0.9  # standard deviations of the logarithm
_LEAST, _MOST = 4, 2048


def lengths(count: int, scale: float, seed: int) -> list[tuple[int, int]]:
    """Return the tokens in and out of each conversation. ``scale`` multiplies prompts' lengths, not answers'."""
    chance = random.Random(seed)
    return [
        (
            round(scale * _length(chance, MEAN_INPUT, _SPREAD_INPUT)),
            round(_length(chance, MEAN_OUTPUT, _SPREAD_OUTPUT)),
        )
        for _ in range(count)
    ]


def _length(chance: random.Random, mean: float, spread: float) -> float:
    return min(_MOST, max(_LEAST, chance.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


def write_conversations(path: Path, tokenizer: Path, count: int, scale: float = 1.0, seed: int = 1) -> Path:
    """Write ``count`` conversations to ``path`` and return the path. ``tokenizer``: a directory with tokenizer.json.

    Real tokenizers encode the random text to a few tokens more than it was decoded from.
    """
    from tokenizers import Tokenizer  # type: ignore[import-untyped, unused-ignore]

    words = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    chance, size = random.Random(seed), words.get_vocab_size()

    def text(tokens: int) -> str:
        return str(words.decode([chance.randrange(size) for _ in range(tokens)]))

    turns = [[{"value": text(asked)}, {"value": text(answered)}] for asked, answered in lengths(count, scale, seed)]
    path.write_text(json.dumps([{"id": str(n), "conversations": one} for n, one in enumerate(turns)]))
    return path
