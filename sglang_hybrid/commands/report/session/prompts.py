"""Prompts of text and of retrieval tasks, in the tokens of the loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from sglang_hybrid.commands.eval.haystack import Haystack
from sglang_hybrid.commands.eval.lines import lines_prompts
from sglang_hybrid.commands.eval.needle import needle_prompts
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt, TextPrompt
from sglang_hybrid.commands.eval.text import builtin_text, windows
from sglang_hybrid.commands.report.session.loaded import Loaded

_RANDOM_TOKENS = 60_000


def text_tokens(session: Loaded) -> list[int]:
    """Return the tokens of Python's language reference, or random tokens for a model without a tokenizer."""
    if session.model.tokenizer is None:
        random, vocabulary = Random(0), session.model.model_config.vocab_size
        return [random.randrange(1, vocabulary) for _ in range(_RANDOM_TOKENS)]
    ids: list[int] = session.model.tokenizer.encode(builtin_text(), add_special_tokens=False)
    return ids


def text_prompts(session: Loaded, count: int, prompt_tokens: int, decode_tokens: int) -> list[TextPrompt]:
    return windows(text_tokens(session), count, prompt_tokens, decode_tokens)


def rows_of_text(session: Loaded, count: int, tokens: int) -> list[list[int]]:
    """Return ``count`` different prompts of ``tokens`` tokens each. At its end the text continues from its start."""
    ids = text_tokens(session)
    starts = (len(ids) * number // count for number in range(count))
    return [[ids[(start + offset) % len(ids)] for offset in range(tokens)] for start in starts]


def retrieval_prompts(
    session: Loaded, lengths: Sequence[int], depths: Sequence[float], repeats: int, tasks: Sequence[str]
) -> list[RetrievalPrompt]:
    """Return prompts of the tasks ``needle`` and ``lines``; none without a tokenizer, which the questions need."""
    tokenizer: Any = session.model.tokenizer
    if tokenizer is None or not lengths:
        return []
    haystack = Haystack(tokenizer, builtin_text())
    prompts: list[RetrievalPrompt] = []
    if "needle" in tasks:
        prompts += needle_prompts(haystack, lengths, depths, repeats)
    if "lines" in tasks:
        prompts += lines_prompts(haystack, lengths, repeats * len(depths))
    return prompts
