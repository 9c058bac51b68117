"""Text to predict and to hide needles in: the user's files, or a text that every Python installation has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.longbench import read_records
from sglang_hybrid.commands.eval.prompts import TextPrompt


def builtin_text() -> str:
    """Return Python's language reference, about 113,000 tokens: the help topics of CPython."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


def read_text(paths: Sequence[Path] = ()) -> str:
    """Return the text of all files, of LongBench records (``.jsonl``) the contexts; without files the built-in text."""
    return "\n\n".join(_read(path) for path in paths) if paths else builtin_text()


def _read(path: Path) -> str:
    if path.suffix == ".jsonl":
        return "\n\n".join(record.context for record in read_records(path))
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text (byte {error.start}): convert it, or leave it out") from error
    if not text.strip():
        raise InputError(f"{path} is empty: leave it out")
    return text


def windows(ids: Sequence[int], count: int, prompt_tokens: int, decode_tokens: int) -> list[TextPrompt]:
    """Return ``count`` pieces of the text, at evenly spread places. Raise InputError if the pieces do not fit."""
    if min(count, prompt_tokens, decode_tokens) < 1:
        raise InputError(f"{count} windows of {prompt_tokens} + {decode_tokens} tokens: each must be at least 1")
    starts = [len(ids) * (n + 1) // (count + 1) for n in range(count)]
    size = prompt_tokens + decode_tokens
    if starts[-1] + size > len(ids):
        raise InputError(
            f"the text has {len(ids)} tokens: the last of {count} windows begins at token {starts[-1]} and needs "
            f"{size} ({prompt_tokens} + {decode_tokens}). Give more text (about {size * (count + 1)} tokens), "
            "fewer windows or shorter ones"
        )
    prompts = []
    for start in starts:
        end = start + prompt_tokens
        prompts.append(TextPrompt(tuple(ids[start:end]), tuple(ids[end : end + decode_tokens]), start))
    return prompts
