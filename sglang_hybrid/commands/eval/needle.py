"""A needle in a haystack: one sentence at some depth of a long text, and a question about it at the end."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.haystack import Haystack, insert
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.tokenizer import Tokenizer, beginning, tokens
from sglang_hybrid.commands.eval.words import CITIES

TASK = "needle"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_SPARE_TOKENS = 4  # a model may put a word or a quotation mark before the number


def sentence(city: str, number: str) -> str:
    return f" The special magic number of {city} is {number}."


def question(city: str) -> str:
    """Return the question and the beginning of its answer: small models complete text better than they obey."""
    return f"\n\nQuestion: What is the special magic number of {city}?\nAnswer: The special magic number of {city} is"


def answer_tokens(tokenizer: Tokenizer, answer: str) -> int:
    return len(tokens(tokenizer, f" {answer}.")) + _SPARE_TOKENS


def filling(task: str, length: int, frame: int) -> int:
    """Return the tokens of haystack in a prompt with ``frame`` other tokens. Raise InputError if none is left."""
    if length <= frame:
        raise InputError(f"task {task} needs at least {frame + 1} tokens, not {length}: raise the length")
    return length - frame


def cities_and_numbers(haystack: Haystack, count: int, random: Random) -> dict[str, str]:
    """Return ``count`` different cities with different numbers, for prompts that hide several needles."""
    numbers: dict[str, str] = {}
    for city in random.sample(CITIES, count):
        numbers[city] = haystack.number(random, numbers.values())
    return numbers


def spread_depths(count: int) -> list[float]:
    return [(n + 0.5) / count for n in range(count)]


def needle_prompts(
    haystack: Haystack,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    repeats: int = 1,
    seed: int = 0,
) -> list[RetrievalPrompt]:
    """Return ``repeats`` prompts for each depth and length, each with its own part of the text, city and number.

    A prompt depends on its length, depth, repeat and the seed, not on the other prompts. Raise
    InputError for a depth outside 0 to 1, and for a length that is too short.
    """
    return [
        _prompt(haystack, length, depth, Random(f"{TASK} {seed} {length} {depth} {repeat}"))
        for length in lengths
        for depth in map(float, depths)
        for repeat in range(repeats)
    ]


def _prompt(haystack: Haystack, length: int, depth: float, random: Random) -> RetrievalPrompt:
    if not 0 <= depth <= 1:
        raise InputError(f"depth {depth}: must be from 0 (beginning) to 1 (right before the question)")
    tokenizer = haystack.tokenizer
    city, number = random.choice(CITIES), haystack.number(random)
    begin, needle, end = (
        beginning(tokenizer),
        tokens(tokenizer, sentence(city, number)),
        tokens(tokenizer, question(city)),
    )
    size = filling(TASK, length, len(begin) + len(needle) + len(end))
    text = insert(haystack.take(size, random), [(depth, needle)])
    return RetrievalPrompt(TASK, begin + text + end, (number,), length, depth, answer_tokens(tokenizer, number))
