"""Requests of a chaos run: a fixed set of different requests, made from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

SHORTEST = 10
_BEGINNINGS = 3  # prefixes that long prompts share
_LONGEST_WITH_GRAMMAR = 100  # tokens, within every budget: the text stays the same after a retraction
_GRAMMAR = r"([a-z]{2,7} ){3,12}[a-z]{2,7}\."


@dataclass(frozen=True)
class Request:
    """A prompt, and the number, length and grammar of its greedy continuations."""

    number: int
    ids: tuple[int, ...]
    new_tokens: int
    answers: int = 1  # the n of the OpenAI API
    grammar: str | None = None  # a regular expression

    @property
    def sampling(self) -> dict[str, object]:
        asked: dict[str, object] = {"temperature": 0, "max_new_tokens": self.new_tokens, "ignore_eos": True}
        if self.answers > 1:
            asked["n"] = self.answers
        if self.grammar:
            asked |= {"regex": self.grammar, "ignore_eos": False}
        return asked


def source_text(chance: random.Random) -> str:
    """Return the sentences of Python's manual in random order, so that no model knows the text by heart."""
    sentences = " ".join(topics[key] for key in sorted(topics)).replace("\n", " ").split(". ")
    chance.shuffle(sentences)
    return ". ".join(" ".join(sentence.split()) for sentence in sentences)


def make_requests(ids: Sequence[int], chance: random.Random, count: int, longest: int) -> list[Request]:
    """Return ``count`` requests of 10 to ``longest`` tokens, cut from the long text ``ids``; some share a prefix."""
    beginnings = [_part(ids, longest, chance) for _ in range(_BEGINNINGS)]
    made = []
    for number in range(count):
        # as many short prompts as long ones, and always the longest
        length = longest if number == 0 else int(SHORTEST * (longest / SHORTEST) ** chance.random())
        has_grammar = number % 5 == 4
        if has_grammar:
            length = min(length, _LONGEST_WITH_GRAMMAR)
        shared = chance.randrange(length // 2, length) if length > 64 and chance.random() < 0.6 else 0
        prompt = (*chance.choice(beginnings)[:shared], *_part(ids, length - shared, chance))
        made.append(
            Request(
                number,
                prompt,
                new_tokens=chance.randrange(18, 49),
                answers=chance.choice((2, 3)) if number % 5 == 3 else 1,
                grammar=_GRAMMAR if has_grammar else None,
            )
        )
    return made


def _part(ids: Sequence[int], length: int, chance: random.Random) -> tuple[int, ...]:
    start = chance.randrange(len(ids) - length)
    return tuple(ids[start : start + length])
