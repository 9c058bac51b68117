"""Attention weights of single tokens from the CPU kernels, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mailbox_host import SCALE, Host, Lists

from sglang_hybrid.ops import reference, reference_weights


def both(host: Host, lists: Lists, lse: torch.Tensor, layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights that the kernel computes, and those that the reference computes."""
    arguments = lists.query, host.pool[0, layer], lists.ids, lists.fill, SCALE, lse, lists.masks
    return host.local.token_weights(*arguments), reference_weights.token_weights(*arguments)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 5, 16]),
    head_dim=st.sampled_from([64, 96, 128, 256]),
    listed=st.integers(0, Host.max_blocks),
    masked=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_weights_are_those_of_the_reference(
    dtype: str, kv_heads: int, group: int, head_dim: int, listed: int, masked: bool, seed: int
) -> None:
    host = Host(dtype, kv_heads, group, head_dim)
    lists = (host.masked_lists if masked else host.random_lists)(host.rows, listed, seed)
    keys, values = host.pool[:, 1]
    _, lse = reference.attend_blocks(lists.query, keys, values, lists.ids, lists.fill, SCALE, masks=lists.masks)
    found, expected = both(host, lists, lse)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    total = found.sum(dim=(3, 4)).flatten(1)
    torch.testing.assert_close(total, (lse > -torch.inf).float(), rtol=1e-3, atol=0)


def test_an_lse_of_more_tokens_gives_shares_of_them_and_none_gives_zeros() -> None:
    host = Host()
    lists = host.full_lists(rows=2)
    keys, values = host.pool[:, 1]
    _, lse = reference.attend_blocks(lists.query, keys, values, lists.ids, lists.fill, SCALE)
    lse = lse + 1.0
    lse[1] = -torch.inf
    found, expected = both(host, lists, lse)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    assert not found[1].any()


def test_keys_of_tokens_that_do_not_count_may_be_anything() -> None:
    host = Host()
    lists = host.masked_lists(host.rows, host.max_blocks, 4)
    assert lists.masks is not None
    lists.masks.bitwise_and_(~(1 << 3))
    lse = torch.zeros(lists.query.shape[:2])
    expected = both(host, lists, lse)[1]
    host.pool[0, 1, :, :, 3] = torch.nan
    torch.testing.assert_close(both(host, lists, lse)[0], expected, rtol=1e-4, atol=1e-6)


def test_keys_of_another_pool_are_refused() -> None:
    host, other = Host(), Host()
    lists = host.full_lists()
    with pytest.raises(ValueError, match="no layer of this pool"):
        host.local.token_weights(
            lists.query, other.pool[0, 0, 1:], lists.ids, lists.fill, SCALE, torch.zeros(lists.query.shape[:2])
        )
