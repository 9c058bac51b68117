"""Text of any length to insert needles into."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from random import Random

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.tokenizer import Tokenizer, tokens

# \u...: the full stop, ! and ? of Chinese, which has no spaces
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])(?=\s)|(?<=[\u3002\uff01\uff1f])|(?=\n\n)")
# Tables and minified code have no sentences, so they are cut: a needle must not land far from its depth.
_SHORTER_PIECES = re.compile(r".{1,500}(?=\s|\Z)|.{1,500}", re.DOTALL)

Sentences = list[tuple[int, ...]]


class Haystack:
    """A text as tokenized sentences, each with the space before it. The text wraps around.

    Sentences are encoded one by one, so that a needle between two sentences changes no other token, and only when they
    are needed: a user's text may be a library.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        if not text.strip():
            raise InputError("the haystack is empty: give a text")
        self.text = text
        self.tokenizer = tokenizer
        sentences = _BETWEEN_SENTENCES.split("\n\n" + text.strip())
        pieces = chain.from_iterable(_SHORTER_PIECES.findall(sentence) for sentence in sentences)
        self._pieces = [piece for piece in pieces if piece.strip()]
        self._encoded: dict[int, tuple[int, ...]] = {}

    def take(self, size: int, random: Random) -> Sentences:
        """Return ``size`` tokens that end with a sentence. The first sentence may be cut: no question is about it."""
        index, left = random.randrange(len(self._pieces)), size
        taken: Sentences = []
        while left > 0:
            sentence = self._sentence(index)
            taken.append(sentence[-left:])
            left -= len(sentence)
            index = (index - 1) % len(self._pieces)
        return taken[::-1]

    def number(self, random: Random, others: Iterable[str] = ()) -> str:
        """Return five digits that are neither in the text nor in ``others``, so that no model finds them by chance."""
        taken = set(others)
        for _ in range(1000):
            number = str(random.randrange(10_000, 100_000))
            if number not in self.text and number not in taken:
                return number
        raise InputError("the haystack has nearly all numbers of five digits in it: give another text")

    def _sentence(self, index: int) -> tuple[int, ...]:
        if index not in self._encoded:
            if not (sentence := tokens(self.tokenizer, self._pieces[index])):
                raise InputError(f"the tokenizer makes nothing of {self._pieces[index]!r}: give another text")
            self._encoded[index] = sentence
        return self._encoded[index]


def insert(sentences: Sentences, needles: Sequence[tuple[float, tuple[int, ...]]]) -> tuple[int, ...]:
    """Return all tokens, with each needle at the sentence boundary that is nearest to the needle's depth (0 to 1)."""
    ends = list(accumulate(map(len, sentences), initial=0))
    at: dict[int, Sentences] = {}
    for depth, needle in needles:
        nearest = min(range(len(ends)), key=lambda end: abs(ends[end] - depth * ends[-1]))
        at.setdefault(nearest, []).append(needle)
    parts: Sentences = []
    for end, sentence in enumerate([*sentences, ()]):
        parts += [*at.get(end, ()), sentence]
    return tuple(chain.from_iterable(parts))
