"""Which channels of keys a sketch takes."""

from __future__ import annotations

import torch

from sglang_hybrid.policies.scout.channel_spread import ChannelSpread

DIM = 8


def order_of(keys: torch.Tensor, queries: torch.Tensor | None = None) -> list[int]:
    spread = ChannelSpread(rotary_dim=0, neox=True)
    spread.add(torch.ones(keys.shape[0], 2, DIM) if queries is None else queries, keys)
    return spread.order()[0].tolist()


def test_a_channel_that_varies_between_blocks_only_is_worth_nothing() -> None:
    keys = torch.randn(320, 1, DIM, generator=torch.Generator().manual_seed(2))
    keys[..., 5] = torch.arange(10).repeat_interleave(32)[:, None] * 100.0
    assert order_of(keys)[-1] == 5


def test_a_channel_that_no_query_uses_is_worth_less() -> None:
    keys = torch.randn(320, 1, DIM, generator=torch.Generator().manual_seed(2))
    queries = torch.ones(320, 2, DIM)
    queries[..., 3] = 0.01
    assert order_of(keys, queries)[-1] == 3


def test_a_text_that_is_shorter_than_a_block_will_do() -> None:
    keys = torch.randn(9, 1, DIM, generator=torch.Generator().manual_seed(2))
    keys[..., 1] *= 10
    assert order_of(keys)[0] == 1
