"""The interface that prompts need of a tokenizer. Hugging Face's tokenizers have it."""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...


def tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def beginning(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the model expects before every text. Some models (Llama) answer badly without theirs."""
    return tuple(tokenizer.encode("", add_special_tokens=True))
