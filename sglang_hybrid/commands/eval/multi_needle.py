"""Several needles in one haystack, one prompt per needle. Prompts of a haystack are equal up to the question."""

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
    sentence,
    spread_depths,
)
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.tokenizer import beginning, tokens
from sglang_hybrid.commands.eval.words import CITIES

TASK = "multi-needle"


def multi_needle_prompts(
    haystack: Haystack, lengths: Sequence[int], needles: int = 4, repeats: int = 1, seed: int = 0
) -> list[RetrievalPrompt]:
    """Return ``needles`` prompts for each haystack, ``repeats`` haystacks for each length.

    Raise InputError for more needles than cities, and for a length that is too short.
    """
    if not 1 <= needles <= len(CITIES):
        raise InputError(f"{needles} needles: there can be 1 to {len(CITIES)}, one for each city")
    prompts = []
    for length in lengths:
        for repeat in range(repeats):
            prompts += _of_one_haystack(haystack, length, needles, Random(f"{TASK} {seed} {length} {needles} {repeat}"))
    return prompts


def _of_one_haystack(haystack: Haystack, length: int, count: int, random: Random) -> list[RetrievalPrompt]:
    tokenizer = haystack.tokenizer
    numbers, depths = cities_and_numbers(haystack, count, random), spread_depths(count)
    needles = [tokens(tokenizer, sentence(city, number)) for city, number in numbers.items()]
    questions = [tokens(tokenizer, question(city)) for city in numbers]
    begin = beginning(tokenizer)
    frame = len(begin) + sum(map(len, needles)) + max(map(len, questions))
    sentences = haystack.take(filling(TASK, length, frame), random)
    text = begin + insert(sentences, list(zip(depths, needles, strict=True)))
    return [
        RetrievalPrompt(TASK, text + end, (number,), length, depth, answer_tokens(tokenizer, number))
        for end, number, depth in zip(questions, numbers.values(), depths, strict=True)
    ]
