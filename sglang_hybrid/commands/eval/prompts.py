"""What a model is asked. Tokens, not text: every run of a comparison decodes behind exactly the same prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RetrievalPrompt:
    task: str  # "needle", "lines", "multi-needle" or "longbench:<dataset>"
    ids: tuple[int, ...]
    answers: tuple[str, ...]  # all of them must appear in what is decoded; for longbench the best match of any counts
    length: int  # nominal, in tokens
    depth: float | None  # 0 (beginning) to 1, where the needle lies; None if it has no single depth
    new_tokens: int  # to decode


@dataclass(frozen=True)
class TextPrompt:
    """For perplexity and KL: ``following`` is decoded behind ``ids``, whatever the model would have said."""

    ids: tuple[int, ...]
    following: tuple[int, ...]
    place: int  # token of the text where ``ids`` begins
