"""The text that a server calibrates its predictor on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.utils.hf_transformers import tokenizer

from sglang_hybrid.integration.calibrate import text_for


def runner(tokenizer_path: str | None) -> Any:
    args = SimpleNamespace(
        tokenizer_path=tokenizer_path, model_path="a model", tokenizer_mode="auto", trust_remote_code=False
    )
    config = SimpleNamespace(hidden_size=8, context_len=256, vocab_size=300)
    return SimpleNamespace(server_args=args, model_config=config)


@pytest.mark.parametrize(("named", "read"), [(None, "a model"), ("a tokenizer", "a tokenizer")])
def test_text_is_in_the_tokens_of_the_model_unless_a_tokenizer_is_named(
    monkeypatch: pytest.MonkeyPatch, named: str | None, read: str
) -> None:
    asked = []

    def get_tokenizer(path: str, **_options: Any) -> Any:
        asked.append(path)
        return SimpleNamespace(encode=lambda text, add_special_tokens: [min(ord(letter), 255) for letter in text])

    monkeypatch.setattr(tokenizer, "get_tokenizer", get_tokenizer)
    text = text_for(runner(named))
    assert asked == [read]
    assert b"statement" in bytes(text.fit[0])
    assert bytes(text.special[0]).startswith(b"The ferry")


@pytest.mark.parametrize("tokens", [[], [0]])
def test_a_tokenizer_without_words_is_none(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """Transformers creates an empty tokenizer for a model without tokenizer files. Its texts are never long enough."""
    empty = SimpleNamespace(encode=lambda text, add_special_tokens: tokens)
    monkeypatch.setattr(tokenizer, "get_tokenizer", lambda path, **_options: empty)
    text = text_for(runner(None))
    assert 1 < max(map(max, text.fit)) < 300
