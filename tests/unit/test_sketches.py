"""Sketches: which channels they hold, that they follow the keys, and what selection sees through them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.memory.pages import touched_pages
from sglang_hybrid.memory.sketches import DTYPE, Sketches, channel_order
from sglang_hybrid.policies.base import LayerCache

HEADS, TOKENS, DIM, PAGES = 2, 4, 16, 6


@pytest.mark.parametrize(("neox", "rotary"), [(True, 16), (False, 16), (True, 8), (False, 8)])
@settings(max_examples=30)
@given(seed=st.integers(0, 2**31))
def test_an_order_holds_every_channel_once_and_rotated_partners_side_by_side(neox: bool, rotary: int, seed: int):
    importance = torch.rand(HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    order = channel_order(importance, rotary, neox)
    assert torch.equal(order.sort(dim=1).values, torch.arange(DIM).expand(HEADS, -1))

    def partner(channel: int) -> int | None:
        if channel >= rotary:
            return None
        return (channel + rotary // 2) % rotary if neox else channel ^ 1

    for head in range(HEADS):
        listed, worth = order[head].tolist(), []
        for place, channel in enumerate(listed):
            other = partner(channel)
            if other is None:
                worth.append(float(importance[head, channel]))
            else:
                assert abs(listed.index(other) - place) == 1
                worth.append(float(importance[head, channel] + importance[head, other]))
        assert worth == pytest.approx(sorted(worth, reverse=True))


def random_keys(seed: int = 0) -> torch.Tensor:
    return torch.randn(PAGES, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(seed))


def test_a_refresh_writes_the_chosen_channels_of_its_pages_and_of_no_others():
    keys = random_keys()
    keys[3, :, 2:] = float("nan")  # behind the last token there may be anything
    sketches = Sketches(4, layers=2, pages=PAGES, heads=HEADS, page_tokens=TOKENS, device="cpu")
    order = torch.stack([torch.randperm(DIM), torch.randperm(DIM)])
    sketches.choose(1, order)
    sketches.refresh(1, keys, torch.tensor([1, 3]), torch.tensor([4, 2]))
    sketch = sketches.of_layer(1)
    assert torch.equal(sketch.channels, order[:, :4])
    for page, filled in ((1, 4), (3, 2)):
        for head in range(HEADS):
            expected = keys[page, head, :filled][:, order[head, :4]].to(DTYPE)
            assert torch.equal(sketch.tokens[page, head, :filled].float(), expected.float())
            assert not sketch.tokens[page, head, filled:].float().any()
    assert not sketch.tokens[[0, 2, 4, 5]].float().any()
    assert not sketches.of_layer(0).tokens.float().any()


def test_writing_token_by_token_ends_at_the_same_sketch_as_writing_at_once():
    keys, slots = random_keys(), torch.arange(2 * TOKENS, 4 * TOKENS - 1)
    one, other = (Sketches(6, 1, PAGES, HEADS, TOKENS, "cpu") for _ in range(2))
    for slot in slots:
        one.refresh(0, keys, *touched_pages(slot[None], TOKENS))
    other.refresh(0, keys, *touched_pages(slots, TOKENS))
    assert torch.equal(one.of_layer(0).tokens.float(), other.of_layer(0).tokens.float())


def test_a_sketch_of_all_channels_tells_the_blocks_true_attention():
    keys = random_keys(1).to(DTYPE).float()  # nothing is lost by rounding
    sketches = Sketches(DIM, 1, PAGES, HEADS, TOKENS, "cpu")
    sketches.refresh(0, keys, torch.arange(PAGES), torch.full((PAGES,), TOKENS))
    digests = torch.stack((keys.amax(dim=2), keys.amin(dim=2)), dim=2)
    cache = LayerCache(keys, keys, digests, 0, sketches.of_layer(0))
    query, table, scale = torch.randn(1, 3 * HEADS, DIM), torch.tensor([[4, 0, 2]]), 0.3
    seen = cache.estimates(query, table, 0.5, scale)[0] * scale
    for head in range(HEADS):
        for group in range(3):
            for place, page in enumerate((4, 0, 2)):
                logits = keys[page, head] @ query[0, 3 * head + group] * scale
                assert float(seen[head, group, place]) == pytest.approx(float(logits.logsumexp(0)), rel=1e-4, abs=1e-5)


def test_a_partial_sketch_finds_one_key_among_many_that_extremes_hide():
    """Two blocks with equal extremes: only one has a key that is large in both channels of the query at once."""
    keys = torch.zeros(2, 1, TOKENS, DIM)
    keys[0, 0, 0, 0], keys[0, 0, 1, 1] = 6.0, 6.0
    keys[1, 0, 0, :2] = 6.0
    sketches = Sketches(2, 1, 2, 1, TOKENS, "cpu")
    sketches.refresh(0, keys, torch.arange(2), torch.full((2,), TOKENS))
    digests = torch.stack((keys.amax(dim=2), keys.amin(dim=2)), dim=2)
    query = torch.zeros(1, 1, DIM)
    query[0, 0, :2] = 1.0
    blind = LayerCache(keys, keys, digests).estimates(query, torch.tensor([[0, 1]]), 0.5, 1.0).flatten()
    seeing = LayerCache(keys, keys, digests, 0, sketches.of_layer(0)).estimates(query, torch.tensor([[0, 1]]), 0.5, 1.0)
    assert float(blind[0]) == float(blind[1])
    assert float(seeing.flatten()[1]) > float(seeing.flatten()[0]) + 4


def test_the_memory_of_a_page_is_what_is_taken():
    sketches = Sketches(8, 3, PAGES, HEADS, TOKENS, "cpu")
    taken = sum(sketches.of_layer(layer).tokens.nbytes for layer in range(3))
    assert Sketches.bytes_per_page(8, 3, HEADS, TOKENS) * PAGES == taken
