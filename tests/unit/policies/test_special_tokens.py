"""Windows with the tokens of chats and of the start of prompts, from tokenizers with and without them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_hybrid.policies.scout.special_tokens import special_windows

START, TURN = 1000, 1001


def encode(text: str, add_special_tokens: bool) -> list[int]:
    return [START] * add_special_tokens + [TURN if letter == "|" else ord(letter) for letter in text]


def template(messages: list[dict[str, str]], **_options: Any) -> str:
    return "".join(f"|{message['role']}: {message['content']}" for message in messages)


def refuses(_messages: Any, **_options: Any) -> str:
    raise ValueError("this model wants a system message")


def tokenizer(**parts: Any) -> SimpleNamespace:
    return SimpleNamespace(encode=encode, **parts)


def test_prompts_chats_and_all_special_tokens_have_a_window_each() -> None:
    chats = tokenizer(all_special_ids=[START, 7], chat_template="any", apply_chat_template=template)
    plain, chat, special = special_windows(chats, 200)
    assert plain[:2] == (START, ord("T"))
    assert chat[0] == TURN
    assert chat.count(TURN) == 3
    assert special == (START, ord("T"), ord("h"), 7, ord("T"), ord("h"))


def test_a_tokenizer_may_have_no_chats() -> None:
    assert [window[0] for window in special_windows(tokenizer(), 200)] == [START]
    assert [window[0] for window in special_windows(tokenizer(chat_template=None, all_special_ids=[]), 200)] == [START]


def test_a_template_may_refuse_these_messages() -> None:
    refusing = tokenizer(chat_template="any", apply_chat_template=refuses)
    assert [window[0] for window in special_windows(refusing, 200)] == [START]


def test_windows_are_as_long_as_the_models_context_at_most() -> None:
    chats = tokenizer(all_special_ids=[START, 7], chat_template="any", apply_chat_template=template)
    assert [len(window) for window in special_windows(chats, 5)] == [5, 5, 5]
