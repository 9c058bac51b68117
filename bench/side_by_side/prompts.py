"""Token ids to send: rows that share a prompt differ in its last tokens, so that each answer is its own."""

from __future__ import annotations

import json
import random
from pathlib import Path

from bench.synthetic_model import next_token, prompt, read_model

OWN_TOKENS = 32


class Prompts:
    def __init__(self, model: Path, seed: int) -> None:
        self._synthetic = read_model(model)
        self._vocabulary: int = json.loads((model / "config.json").read_text())["vocab_size"]
        self._seed = seed

    def rows(self, length: int, rows: int, different: int) -> list[list[int]]:
        """``rows`` prompts of ``length`` tokens, of which ``different`` have nothing in common."""
        beginnings = self.beginnings(length, min(different, rows))
        return [
            beginnings[row % len(beginnings)] + self._tokens(OWN_TOKENS, f"row {row} of {length}")
            for row in range(rows)
        ]

    def beginnings(self, length: int, different: int) -> list[list[int]]:
        return [self._tokens(length - OWN_TOKENS, f"beginning {n} of {length}") for n in range(different)]

    def expected_share(self, asked: list[int], answer: list[int]) -> float | None:
        """Of an answer, the share that a synthetic model must give, whatever its attention; None for other models."""
        if not self._synthetic or not answer:
            return None
        before = [asked[-1], *answer]
        vocabulary = self._synthetic[0].vocabulary
        return sum(next_token(a, vocabulary) == b for a, b in zip(before, answer, strict=False)) / len(answer)

    def _tokens(self, count: int, which: str) -> list[int]:
        seed = random.Random(f"{self._seed} {which}").getrandbits(32)
        if self._synthetic:
            return prompt(count, *self._synthetic, seed)
        return random.Random(seed).choices(range(self._vocabulary // 2), k=count)
