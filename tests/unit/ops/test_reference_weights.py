"""Token masks, attention weights, sums of values and lookups against softmax attention and brute force."""

import pytest
import torch
from attention_oracle import Tolerance, seeded
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.ops import reference, reference_weights
from sglang_hybrid.ops.reference import NO_BLOCK

CLOSE: Tolerance = {"rtol": 1e-4, "atol": 2e-5}
SEEDS = st.integers(0, 2**32 - 1)
TOKENS, HEADS, GROUP, DIM, PAGES, LISTED, SCALE = 32, 2, 3, 16, 9, 4, 0.25


class Lists:
    """Two rows with lists of blocks. The last block of a list is partial, and random tokens of each are masked out."""

    def __init__(self, seed: int) -> None:
        rng = seeded(seed)
        self.query = torch.randn(2, HEADS * GROUP, DIM, generator=rng)
        self.keys, self.values = (torch.randn(PAGES, HEADS, TOKENS, DIM, generator=rng) for _ in range(2))
        self.ids = torch.stack([torch.randperm(PAGES, generator=rng)[:LISTED] for _ in range(2 * HEADS)])
        self.ids = self.ids.view(2, HEADS, LISTED)
        self.fill = torch.full((2, HEADS, LISTED), TOKENS)
        self.fill[..., -1] = torch.randint(1, TOKENS + 1, (2, HEADS), generator=rng)
        self.ids[0, 0, -1], self.fill[0, 0, -1] = NO_BLOCK, 0
        bits = torch.randint(0, 2, (2, HEADS, LISTED, TOKENS), generator=rng)
        self.bits = bits.bool()
        self.masks = (bits << torch.arange(TOKENS)).sum(dim=3).to(torch.int32)  # bit 31 is the sign

    def counted(self, row: int, head: int) -> list[tuple[int, int]]:
        """Return (position in the list, token) of every token that is neither masked out nor beyond the fill."""
        return [
            (n, t) for n in range(LISTED) for t in range(int(self.fill[row, head, n])) if self.bits[row, head, n, t]
        ]

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.attend_blocks(self.query, self.keys, self.values, self.ids, self.fill, SCALE, masks=self.masks)


@given(SEEDS)
def test_only_tokens_whose_bit_is_set_are_attended(seed: int) -> None:
    lists = Lists(seed)
    out, lse = lists.attend()
    for row in range(2):
        for head in range(HEADS):
            entries = lists.counted(row, head)
            pages = [int(lists.ids[row, head, n]) for n, _ in entries]
            k = torch.stack([lists.keys[p, head, t] for p, (_, t) in zip(pages, entries, strict=True)]).double()
            v = torch.stack([lists.values[p, head, t] for p, (_, t) in zip(pages, entries, strict=True)]).double()
            for g in range(GROUP):
                q = head * GROUP + g
                logits = k @ lists.query[row, q].double() * SCALE
                torch.testing.assert_close(lse[row, q].double(), logits.logsumexp(0), **CLOSE)
                torch.testing.assert_close(out[row, q].double(), logits.softmax(0) @ v, **CLOSE)


def test_masks_of_all_bits_change_nothing_and_of_no_bit_leave_nothing() -> None:
    lists = Lists(1)
    plain = reference.attend_blocks(lists.query, lists.keys, lists.values, lists.ids, lists.fill, SCALE)
    lists.masks = torch.full_like(lists.masks, -1)
    for masked, unmasked in zip(lists.attend(), plain, strict=True):
        assert torch.equal(masked, unmasked)
    lists.masks = torch.zeros_like(lists.masks)
    out, lse = lists.attend()
    assert not out.any() and (lse == -torch.inf).all()


@given(SEEDS)
def test_weights_times_values_are_the_attention_over_the_list(seed: int) -> None:
    lists = Lists(seed)
    out, lse = lists.attend()
    weights = reference_weights.token_weights(lists.query, lists.keys, lists.ids, lists.fill, SCALE, lse, lists.masks)
    ones = torch.ones(2, HEADS, GROUP)
    torch.testing.assert_close(reference_weights.block_weights(weights).sum(dim=3), ones, **CLOSE)
    assert not weights[~lists.bits[:, :, None].expand_as(weights)].any()
    torch.testing.assert_close(reference_weights.sum_values(weights, lists.values, lists.ids), out, **CLOSE)


def test_weights_are_shares_of_whatever_the_lse_is_of() -> None:
    lists = Lists(2)
    _, lse = lists.attend()
    args = (lists.query, lists.keys, lists.ids, lists.fill, SCALE)
    own, half = (reference_weights.token_weights(*args, total, lists.masks) for total in (lse, lse + 0.6931472))
    torch.testing.assert_close(half, own / 2, **CLOSE)
    nothing = reference_weights.token_weights(*args, torch.full_like(lse, -torch.inf), lists.masks)
    assert not nothing.any()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_values_without_a_weight_may_be_anything(garbage: float) -> None:
    lists = Lists(3)
    out, lse = lists.attend()
    weights = reference_weights.token_weights(lists.query, lists.keys, lists.ids, lists.fill, SCALE, lse, lists.masks)
    values = lists.values.clone()
    used = torch.zeros(PAGES, HEADS, TOKENS, dtype=torch.bool)
    for row in range(2):
        for head in range(HEADS):
            for n, t in lists.counted(row, head):
                used[lists.ids[row, head, n], head, t] = True
    values[~used] = garbage
    torch.testing.assert_close(reference_weights.sum_values(weights, values, lists.ids), out, **CLOSE)


@given(SEEDS, st.sampled_from([1, 2, 8]), st.sampled_from([2, 5, 16]))
def test_lookups_are_dot_products_with_the_nearest_centroids(seed: int, groups: int, count: int) -> None:
    rng = seeded(seed)
    keys = torch.randn(3, HEADS, 4, DIM, generator=rng)
    codebooks = torch.randn(HEADS, groups, count, DIM // groups, generator=rng)
    query = torch.randn(2, HEADS * GROUP, DIM, generator=rng)
    codes = reference_weights.nearest_centroids(keys, codebooks)
    parts = keys.unflatten(3, (groups, -1))
    distance = (parts[..., None, :] - codebooks[None, :, None]).norm(dim=-1)
    chosen = distance.gather(4, codes[..., None]).squeeze(4)
    torch.testing.assert_close(chosen, distance.amin(dim=4), **CLOSE)

    listed = codes[:2].to(torch.uint8)  # one block for each row
    logits = reference_weights.lookup_logits(reference_weights.lookup_tables(query, codebooks), listed)
    for row in range(2):
        for head in range(HEADS):
            coarse = torch.cat(
                [codebooks[head, i, codes[row, head, :, i]] for i in range(groups)], dim=1
            )  # quantised keys
            q = query[row].view(HEADS, GROUP, DIM)[head]
            torch.testing.assert_close(logits[row, head], q @ coarse.T, **CLOSE)


@given(SEEDS, st.sampled_from([0.3, 0.5, 0.9, 0.99]))
def test_a_cumulative_share_takes_the_fewest_entries_that_reach_it(seed: int, least: float) -> None:
    weights = torch.randn(4, 50, generator=seeded(seed)).softmax(dim=1)
    kept = reference_weights.cumulative_share(weights, least)
    for row in range(4):
        taken = weights[row][kept[row]]
        assert taken.sum() >= least - 1e-5
        assert taken.sum() - taken.min() < least + 1e-5
        assert taken.min() >= weights[row][~kept[row]].max()


def test_a_cumulative_share_of_one_takes_all_that_has_a_weight() -> None:
    weights = torch.tensor([[0.7, 0.3, 1e-9, 0.0]])
    assert reference_weights.cumulative_share(weights, 1.0).tolist() == [[True, True, True, False]]
