"""The prompts of an evaluation, as tokens: every run of a comparison decodes after exactly the same prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RetrievalPrompt:
    task: str  # "needle", "lines", "multi-needle", "longbench:<dataset>" or "ruler:<task>"
    ids: tuple[int, ...]
    answers: tuple[str, ...]  # all must appear in the decoded text; for longbench the best match counts
    length: int  # nominal, in tokens
    depth: float | None  # of the needle, 0 (beginning) to 1; None if the prompt has no single depth
    new_tokens: int  # maximum number of tokens to decode
    metric: str = ""  # NVIDIA's name of the metric, for RULER; empty for other tasks, which have metrics of their own


@dataclass(frozen=True)
class TextPrompt:
    """A text for perplexity and KL: after ``ids`` the model is fed ``following``, whatever it predicts."""

    ids: tuple[int, ...]
    following: tuple[int, ...]
    place: int  # index of the first token of ``ids`` in the text
