"""What a model is asked. Tokens, not text: every run of a comparison decodes behind exactly the same prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RetrievalPrompt:
    task: str  # "needle", "lines", "multi-needle", "longbench:<dataset>" or "ruler:<task>"
    ids: tuple[int, ...]
    answers: tuple[str, ...]  # all of them must appear in what is decoded; for longbench the best match of any counts
    length: int  # nominal, in tokens
    depth: float | None  # 0 (beginning) to 1, where the needle lies; None if it has no single depth
    new_tokens: int  # to decode, at most
    metric: str = ""  # of RULER, by NVIDIA's name; the other tasks have metrics of their own


@dataclass(frozen=True)
class TextPrompt:
    """For perplexity and KL: ``following`` is decoded behind ``ids``, whatever the model would have said."""

    ids: tuple[int, ...]
    following: tuple[int, ...]
    place: int  # token of the text where ``ids`` begins
