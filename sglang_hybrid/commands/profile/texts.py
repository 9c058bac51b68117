"""The texts of a profile: several kinds, each cut into windows of tokens to fit on, to test on and to decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.haystack import Haystack
from sglang_hybrid.commands.eval.lines import lines_prompts
from sglang_hybrid.commands.eval.multi_needle import multi_needle_prompts
from sglang_hybrid.commands.eval.text import read_text
from sglang_hybrid.commands.eval.tokenizer import Tokenizer, tokens


@dataclass(frozen=True)
class Kind:
    """Windows of one kind of text. A predictor is best on kinds that it was fitted on, so a profile uses several."""

    name: str
    fit: tuple[tuple[int, ...], ...]
    unseen: tuple[int, ...]


def kinds(tokenizer: Tokenizer, files: Sequence[Path], windows: int, window_tokens: int, seed: int = 0) -> list[Kind]:
    """Return the kinds: the user's files or the built-in text, and generated retrieval prompts.

    Raise InputError for a text that cannot be read or is too short.
    """
    found = [_of_text(name, tokens(tokenizer, text), windows, window_tokens) for name, text in _texts(files)]
    haystack = Haystack(tokenizer, read_text(files))
    few = max(1, windows // 4)
    lines = [prompt.ids for prompt in lines_prompts(haystack, [window_tokens], few + 1, seed=seed + 1000)]
    needles = [prompt.ids for prompt in multi_needle_prompts(haystack, [window_tokens], 1, few + 1, seed=seed + 1000)]
    found.append(Kind("generated lines", tuple(lines[:-1]), lines[-1]))
    found.append(Kind("generated needles", tuple(needles[:-1]), needles[-1]))
    return found


def _texts(files: Sequence[Path]) -> list[tuple[str, str]]:
    if not files:
        return [("pydoc topics", read_text())]
    return [(file.name, read_text([file])) for file in files]


def _of_text(name: str, ids: Sequence[int], windows: int, window_tokens: int) -> Kind:
    """Return evenly spread windows. The unseen one is between the last two, with gaps if the text is long enough."""
    places = windows + 1
    if len(ids) < places * window_tokens:
        raise InputError(
            f"{name} has {len(ids)} tokens, {places} windows of {window_tokens} need {places * window_tokens}: give a "
            "longer text, fewer windows (--windows) or shorter ones (--window-tokens)"
        )
    pieces = [tuple(ids[start : start + window_tokens]) for start in (len(ids) * n // places for n in range(places))]
    return Kind(name, tuple(pieces[:-2] + pieces[-1:]), pieces[-2])
