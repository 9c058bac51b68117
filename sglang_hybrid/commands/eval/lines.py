"""Line retrieval, after LongEval: lines of the same form, spread over a text, and a question about one of the lines.

This task is harder for block selection than a needle: every line looks like the answer, and only the key differs.
LongEval's prompts consist of lines only, which small models cannot tell apart even with full attention. So the prompts
here have few lines, and the rest is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.haystack import Haystack, insert
from sglang_hybrid.commands.eval.needle import (
    answer_tokens,
    cities_and_numbers,
    filling,
    question,
    spread_depths,
)
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.tokenizer import beginning, tokens
from sglang_hybrid.commands.eval.words import CITIES

TASK = "lines"
LINES = 8


def line(key: str, number: str) -> str:
    return f"\nThe special magic number of {key} is {number}.\n"


def lines_prompts(
    haystack: Haystack, lengths: Sequence[int], repeats: int = 1, seed: int = 0, lines: int = LINES
) -> list[RetrievalPrompt]:
    """Return ``repeats`` prompts for each length, which ask for lines at different depths.

    Raise InputError for more lines than cities, and for a length that is too short.
    """
    if not 1 <= lines <= len(CITIES):
        raise InputError(f"{lines} lines: there can be 1 to {len(CITIES)}, one for each city")
    prompts = []
    for length in lengths:
        for repeat in range(repeats):
            random = Random(f"{TASK} {seed} {length} {lines} {repeat}")
            prompts.append(_prompt(haystack, length, lines, (repeat + random.random()) / repeats, random))
    return prompts


def _prompt(haystack: Haystack, length: int, count: int, depth: float, random: Random) -> RetrievalPrompt:
    tokenizer = haystack.tokenizer
    numbers, depths = cities_and_numbers(haystack, count, random), spread_depths(count)
    asked = min(int(depth * count), count - 1)
    key = list(numbers)[asked]
    lines = [tokens(tokenizer, line(city, number)) for city, number in numbers.items()]
    begin, end = beginning(tokenizer), tokens(tokenizer, question(key))
    sentences = haystack.take(filling(TASK, length, len(begin) + sum(map(len, lines)) + len(end)), random)
    text = insert(sentences, list(zip(depths, lines, strict=True)))
    new_tokens = answer_tokens(tokenizer, numbers[key])
    return RetrievalPrompt(TASK, begin + text + end, (numbers[key],), length, depths[asked], new_tokens)
