"""Prompts as token ids. Rows that share a prompt differ in its last tokens, so that their answers differ."""

from __future__ import annotations

import json
import random
from pathlib import Path

from bench.side_by_side.real_text import RealText
from bench.synthetic_model import next_token, prompt, read_model

OWN_TOKENS = 32


class Prompts:
    """Prompts for a model: synthetic text for a synthetic model, else real text, or random tokens without tokenizer."""

    def __init__(self, model: Path, seed: int) -> None:
        self._synthetic = read_model(model)
        tokenizer = model / "tokenizer.json"
        self._text = RealText(tokenizer, seed) if not self._synthetic and tokenizer.is_file() else None
        self._made: dict[tuple[int, str], list[int]] = {}
        self._vocabulary: int = json.loads((model / "config.json").read_text())["vocab_size"]
        self._seed = seed

    def rows(self, length: int, rows: int, different: int) -> list[list[int]]:
        """Return ``rows`` prompts of ``length`` tokens, of which ``different`` have nothing in common."""
        beginnings = self.beginnings(length, min(different, rows))
        return [
            beginnings[row % len(beginnings)] + self._tokens(OWN_TOKENS, f"row {row} of {length}")
            for row in range(rows)
        ]

    def beginnings(self, length: int, different: int) -> list[list[int]]:
        return [self._tokens(length - OWN_TOKENS, f"beginning {n} of {length}") for n in range(different)]

    def expected_share(self, asked: list[int], answer: list[int]) -> float | None:
        """Return the share of answer tokens that a synthetic model must give, whatever its attention.

        None for other models and for an empty answer.
        """
        if not self._synthetic or not answer:
            return None
        before = [asked[-1], *answer]
        vocabulary = self._synthetic[0].vocabulary
        return sum(next_token(a, vocabulary) == b for a, b in zip(before, answer, strict=False)) / len(answer)

    @property
    def kind(self) -> str:
        return "synthetic" if self._synthetic else "real text" if self._text else "random tokens"

    def _tokens(self, count: int, which: str) -> list[int]:
        """Return ``count`` tokens, always the same for the same ``which``."""
        if self._text is not None:
            if (count, which) not in self._made:
                self._made[count, which] = self._text.take(count)
            return self._made[count, which]
        seed = random.Random(f"{self._seed} {which}").getrandbits(32)
        if self._synthetic:
            return prompt(count, *self._synthetic, seed)
        return random.Random(seed).choices(range(self._vocabulary // 2), k=count)
