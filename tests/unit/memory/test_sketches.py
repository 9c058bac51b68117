"""Sketches: the channels that they hold, their updates when keys are written, and estimates computed from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.blocks import BLOCK_TOKENS, COMPACT_GROUP, compact_bytes
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import LayerCache
from sglang_hybrid.memory.capacity import KVShape
from sglang_hybrid.memory.device_capacity import PageBytes, page_bytes
from sglang_hybrid.memory.digests import CompactDigests, Digests
from sglang_hybrid.memory.pages import touched_pages
from sglang_hybrid.memory.sketches import Sketches, channel_order
from sglang_hybrid.ops import reference

HEADS, TOKENS, DIM, PAGES = 2, 4, 16, 6


def bytes_of_page(layers: int, channels: int) -> PageBytes:
    """Return the bytes of a page of TOKENS tokens, as used in these tests; a server's pages have BLOCK_TOKENS."""
    config = HybridConfig(sketch_channels=channels, digest_dtype="auto" if channels % 8 else "int8")
    page = page_bytes(config, KVShape(layers, HEADS, 64, 64, 2), "cuda")
    return PageBytes(page.digests, page.sketches * TOKENS // BLOCK_TOKENS)


@pytest.mark.parametrize(("neox", "rotary"), [(True, 16), (False, 16), (True, 8), (False, 8)])
@settings(max_examples=30)
@given(seed=st.integers(0, 2**31))
def test_an_order_holds_every_channel_once_and_rotated_partners_side_by_side(
    neox: bool, rotary: int, seed: int
) -> None:
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


def extremes(keys: torch.Tensor) -> torch.Tensor:
    return torch.stack((keys.amax(dim=2), keys.amin(dim=2)), dim=2)


def test_a_refresh_writes_the_chosen_channels_of_its_pages_and_of_no_others() -> None:
    keys = random_keys()
    sketches = Sketches(4, layers=2, pages=PAGES, heads=HEADS, page_tokens=TOKENS, device="cpu")
    order = torch.stack([torch.randperm(DIM), torch.randperm(DIM)])
    sketches.choose(1, order)
    sketches.refresh(1, keys, extremes(keys), torch.tensor([1, 3]))
    sketch = sketches.of_layer(1)
    assert torch.equal(sketch.channels, order[:, :4])
    expected = reference.sketch_codes(keys, extremes(keys), order[:, :4])
    assert torch.equal(sketch.codes[[1, 3]], expected[[1, 3]])
    assert expected[[1, 3]].any()
    assert not sketch.codes[[0, 2, 4, 5]].any()
    assert not sketches.of_layer(0).codes.any()


def test_who_holds_a_layers_channels_sees_those_that_are_chosen_later() -> None:
    sketches = Sketches(4, layers=2, pages=PAGES, heads=HEADS, page_tokens=TOKENS, device="cpu")
    held, other = sketches.of_layer(0).channels, sketches.of_layer(1).channels.clone()
    order = torch.arange(DIM).flip(0).expand(HEADS, -1)
    sketches.choose(0, order)
    assert torch.equal(held, order[:, :4])
    assert torch.equal(sketches.of_layer(1).channels, other)


def test_writing_token_by_token_ends_at_the_same_sketch_as_writing_at_once() -> None:
    keys, slots = random_keys(), torch.arange(2 * TOKENS, 4 * TOKENS - 1)
    keys[3, :, TOKENS - 1] = float("nan")  # values behind the last token must not matter
    written = []
    for steps in (slots.split(1), (slots,)):
        digests = Digests(1, PAGES, HEADS, DIM, torch.float32, "cpu")
        sketches = Sketches(6, 1, PAGES, HEADS, TOKENS, "cpu")
        for step in steps:
            pages, filled = touched_pages(step, TOKENS)
            digests.refresh(0, keys, pages, filled)
            sketches.refresh(0, keys, digests.of_layer(0), pages)
        written.append(sketches.of_layer(0).codes)
    assert torch.equal(*written)


def test_a_sketch_of_all_channels_nearly_tells_the_blocks_true_attention() -> None:
    keys = random_keys(1)
    sketches = Sketches(DIM, 1, PAGES, HEADS, TOKENS, "cpu")
    sketches.refresh(0, keys, extremes(keys), torch.arange(PAGES))
    cache = LayerCache(keys, keys, extremes(keys), 0, sketches.of_layer(0))
    query, table, scale = torch.randn(1, 3 * HEADS, DIM), torch.tensor([[4, 0, 2]]), 0.3
    seen = cache.estimates(query, table, 0.5, scale)[0] * scale
    for head in range(HEADS):
        for group in range(3):
            for place, page in enumerate((4, 0, 2)):
                logits = keys[page, head] @ query[0, 3 * head + group] * scale
                # a code is off by at most half a sixteenth of its channel's range
                off = float(
                    (query[0, 3 * head + group].abs() * (keys[page, head].amax(0) - keys[page, head].amin(0))).sum()
                )
                assert float(seen[head, group, place]) == pytest.approx(
                    float(logits.logsumexp(0)), abs=off * scale / 32
                )


def test_pages_may_differ_between_kv_heads() -> None:
    keys = random_keys(2)
    sketches = Sketches(6, 1, PAGES, HEADS, TOKENS, "cpu")
    sketches.refresh(0, keys, extremes(keys), torch.arange(PAGES))
    query = torch.randn(1, 2 * HEADS, DIM)
    for sketch in (None, sketches.of_layer(0)):
        cache = LayerCache(keys, keys, extremes(keys), 0, sketch)
        by_head = cache.estimates(query, torch.tensor([[[4, 0], [1, 5]]]), 0.5, 0.3)
        for head, pages in enumerate(([4, 0], [1, 5])):
            alike = cache.estimates(query, torch.tensor([pages]), 0.5, 0.3)
            torch.testing.assert_close(by_head[:, head], alike[:, head])


def test_a_partial_sketch_finds_one_key_among_many_that_extremes_hide() -> None:
    """Two blocks have equal extremes, but only one has a key that is large in both channels of the query at once."""
    keys = torch.zeros(2, 1, TOKENS, DIM)
    keys[0, 0, 0, 0], keys[0, 0, 1, 1] = 6.0, 6.0
    keys[1, 0, 0, :2] = 6.0
    sketches = Sketches(2, 1, 2, 1, TOKENS, "cpu")
    sketches.refresh(0, keys, extremes(keys), torch.arange(2))
    query = torch.zeros(1, 1, DIM)
    query[0, 0, :2] = 1.0
    table = torch.tensor([[0, 1]])
    blind = LayerCache(keys, keys, extremes(keys)).estimates(query, table, 0.5, 1.0).flatten()
    seeing = LayerCache(keys, keys, extremes(keys), 0, sketches.of_layer(0)).estimates(query, table, 0.5, 1.0)
    assert float(blind[0]) == float(blind[1])
    assert float(seeing.flatten()[1]) > float(seeing.flatten()[0]) + 4


def test_the_memory_of_a_page_is_what_is_taken() -> None:
    sketches = Sketches(8, 3, PAGES, HEADS, TOKENS, "cpu")
    taken = sum(sketches.of_layer(layer).codes.nbytes for layer in range(3))
    assert bytes_of_page(3, 8).sketches * PAGES == taken


# -- compact digests -------------------------------------------------------------------------


def wide_keys(seed: int = 0) -> torch.Tensor:
    """Return keys of blocks that differ from each other, with one channel that is larger than all others."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(PAGES, HEADS, TOKENS, 64, generator=random)
    keys += 2 * torch.randn(PAGES, HEADS, 1, 64, generator=random)
    keys[..., 5] *= 20
    return keys


def test_compact_digests_tell_middles_to_half_a_unit_and_ranges_of_the_sketch() -> None:
    keys, channels = wide_keys(), torch.stack([torch.randperm(64)[:16] for _ in range(HEADS)])
    exact = extremes(keys)
    compact = reference.compact_digest(exact, channels)
    assert compact.shape == (PAGES, HEADS, compact_bytes(64, 16)) and compact.dtype == torch.uint8
    told = reference.expand_digest(compact, channels, 64)
    middle = exact.mean(dim=2)
    largest = middle.unflatten(2, (-1, COMPACT_GROUP)).abs().amax(dim=3)
    unit = (largest / 127).repeat_interleave(COMPACT_GROUP, dim=2)
    assert ((told.mean(dim=2) - middle).abs() <= unit * 0.51 + largest.max() * 1e-6).all()
    ranges, true_ranges = told[:, :, 0] - told[:, :, 1], exact[:, :, 0] - exact[:, :, 1]
    where = channels.expand(PAGES, -1, -1)
    torch.testing.assert_close(ranges.gather(2, where), true_ranges.gather(2, where), rtol=1e-3, atol=1e-4)
    others = torch.ones_like(ranges, dtype=torch.bool).scatter_(2, where, False)
    assert not ranges[others].any()


def test_a_block_that_is_not_finite_is_seen_to_be_damaged_and_others_are_not() -> None:
    keys, channels = wide_keys(), torch.arange(8).expand(HEADS, -1)
    for page, value in ((1, float("nan")), (2, float("inf")), (4, float("-inf"))):
        keys[page, 0, 3, 40] = value
    told = reference.expand_digest(reference.compact_digest(extremes(keys), channels), channels, 64)
    damaged = ~told.isfinite().flatten(2).all(dim=2)
    assert damaged.nonzero().tolist() == [[1, 0], [2, 0], [4, 0]]


def test_estimates_by_compact_digests_are_nearly_those_by_the_whole_ones() -> None:
    keys, pages = wide_keys(2), torch.arange(PAGES)
    sketches = Sketches(32, 1, PAGES, HEADS, TOKENS, "cpu")
    compact = CompactDigests(sketches, 1, PAGES, HEADS, 64, "cpu")
    query, table = torch.randn(1, 2 * HEADS, 64), pages[None]
    estimates = []
    for digests in (extremes(keys), compact.of_layer(0)):
        compact.refresh(0, keys, pages, torch.full((PAGES,), TOKENS))
        sketches.refresh(0, keys, digests, pages)
        cache = LayerCache(keys, keys, digests, 0, sketches.of_layer(0))
        assert torch.equal(
            cache.estimates(query, table, 0.5, 0.2),
            cache.estimates(query, pages.expand(1, HEADS, -1), 0.5, 0.2),
        )
        estimates.append(cache.estimates(query, table, 0.5, 0.2))
    assert float((estimates[1] - estimates[0]).std()) < 0.03 * float(estimates[0].std())


def test_codes_tell_every_token_its_part_of_the_range() -> None:
    random, most, count = torch.Generator().manual_seed(5), 15, 6
    places = torch.randint(0, most + 1, (PAGES, HEADS, TOKENS, 64), generator=random)
    places[:, :, 0], places[:, :, 1] = 0, most  # so that the range is known: 0 to most + 1
    keys = places + torch.where(places == 0, 0.0, torch.where(places == most, 1.0, 0.6))
    channels = torch.stack([torch.randperm(64, generator=random)[:count] for _ in range(HEADS)])
    codes = reference.sketch_codes(keys, extremes(keys), channels)
    assert codes.shape == (PAGES, HEADS, TOKENS, count // 2) and codes.dtype == torch.uint8
    expected = places.gather(3, channels[None, :, None, :].expand(PAGES, -1, TOKENS, -1))
    assert torch.equal(torch.stack((codes & 15, codes >> 4), dim=4).flatten(3), expected.to(torch.uint8))
    assert bytes_of_page(1, count).sketches * PAGES == codes.nbytes


def test_compact_digests_of_pages_that_grow_are_those_of_the_whole_page() -> None:
    keys = wide_keys(3)
    sketches = Sketches(8, 1, PAGES, HEADS, TOKENS, "cpu")
    written = []
    for filled in (range(1, TOKENS + 1), [TOKENS]):
        digests = CompactDigests(sketches, 1, PAGES, HEADS, 64, "cpu")
        for count in filled:
            digests.refresh(0, keys, torch.tensor([2]), torch.tensor([count]))
        written.append(digests.of_layer(0))
    assert torch.equal(*written) and written[0][2].any() and not written[0][[0, 1, 3, 4, 5]].any()
    assert bytes_of_page(1, 8).digests * PAGES == written[0].nbytes
