"""The order in which a sketch takes channels of keys."""

from __future__ import annotations

import torch

from sglang_hybrid.policies.scout.channel_spread import ChannelSpread

DIM, TOKENS = 8, 640


def order_of(keys: torch.Tensor, queries: torch.Tensor) -> list[int]:
    spread = ChannelSpread(rotary_dim=0, neox=True)
    spread.add(queries, keys)
    return spread.order()[0].tolist()


def random_text(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    return torch.randn(tokens, 1, DIM, generator=random), torch.randn(tokens, 2, DIM, generator=random)


def test_a_channel_that_varies_between_blocks_only_is_worth_nothing() -> None:
    keys, queries = random_text()
    keys[..., 5] = torch.arange(TOKENS // 32).repeat_interleave(32)[:, None] * 3.0
    assert order_of(keys, queries)[-1] == 5


def test_a_channel_that_no_query_uses_is_worth_less() -> None:
    keys, queries = random_text()
    queries[..., 3] = 0.01
    assert order_of(keys, queries)[-1] == 3


def test_tokens_without_attention_do_not_count() -> None:
    """Channel 6 varies most, but only among keys that no query attends to."""
    keys, queries = random_text()
    queries[..., 0] = 30.0
    attended = torch.rand(TOKENS, generator=torch.Generator().manual_seed(3)) < 0.25
    keys[..., 0] = torch.where(attended, 5.0, -5.0)[:, None]
    keys[..., 6] = torch.where(attended, 0.0, 9.0 * (-1) ** torch.arange(TOKENS))[:, None]
    assert order_of(keys, queries)[-1] == 6


def test_a_text_that_is_shorter_than_a_block_will_do() -> None:
    keys, queries = random_text(9)
    keys[..., 1] *= 10
    assert order_of(keys, queries)[0] == 1
