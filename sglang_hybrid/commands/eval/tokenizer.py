"""The one question asked of a tokenizer; those of Hugging Face answer it."""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...


def tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def beginning(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the model expects before every text. Some (Llama) answer badly without their token for it."""
    return tuple(tokenizer.encode("", add_special_tokens=True))
