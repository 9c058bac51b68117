"""How a chaos run reads tokens and logprobs from a server's answer."""

from __future__ import annotations

from math import isnan
from typing import Any

from bench.chaos.asking import _tokens


def said(ids: list[int], told: list[int]) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"output_token_logprobs": [(-0.5 * token, token, None) for token in told]}}


def test_tokens_have_their_logprobs() -> None:
    tokens = _tokens(said([3, 4], [3, 4]), logprobs=True)
    assert tokens is not None
    assert [(token.id, token.logprob) for token in tokens] == [(3, -1.5), (4, -2.0)]


def test_ids_may_be_ahead_of_logprobs() -> None:
    tokens = _tokens(said([3, 4, 5], [3, 4]), logprobs=True)
    assert tokens is not None
    assert [token.id for token in tokens] == [3, 4]


def test_a_first_token_without_a_logprob_is_not_left_out() -> None:
    tokens = _tokens(said([3, 4, 5], [4, 5]), logprobs=True)
    assert tokens is not None
    assert [token.id for token in tokens] == [3, 4, 5]
    assert isnan(tokens[0].logprob)
    assert tokens[1].logprob == -2.0


def test_the_last_word_on_an_aborted_request_is_not_read() -> None:
    item = said([3], [3])
    item["meta_info"]["finish_reason"] = {"type": "abort"}
    assert _tokens(item, logprobs=True) is None
