"""Table lookups and cumulative shares on the GPU, against the reference and against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from cuda_cases import DEVICE, seeded

from sglang_hybrid.ops import reference_weights
from sglang_hybrid.ops.cuda import weights as cuda


@pytest.mark.parametrize(
    ("rows", "heads", "group", "groups", "centroids", "tokens", "index"),
    [
        (2, 2, 3, 4, 256, 70, torch.uint8),
        (1, 1, 1, 1, 2, 1, torch.uint8),
        (1, 2, 5, 32, 256, 1025, torch.uint8),  # tables take several rounds, tokens two CTAs
        (1, 1, 2, 5, 8192, 33, torch.int16),
        (3, 1, 1, 3, 300, 32, torch.int16),
    ],
)
def test_logits_are_sums_of_table_entries(
    rows: int, heads: int, group: int, groups: int, centroids: int, tokens: int, index: torch.dtype
) -> None:
    random = seeded(groups)
    tables = torch.randn(rows, heads, group, groups, centroids, generator=random)
    codes = torch.randint(0, centroids, (rows, heads, tokens, groups), generator=random)
    logits = cuda.lookup_logits(tables.to(DEVICE), codes.to(index).to(DEVICE))
    expected = reference_weights.lookup_logits(tables.double(), codes)
    torch.testing.assert_close(logits.cpu().double(), expected, rtol=1e-5, atol=1e-4)


def test_an_index_beyond_the_tables_reads_their_last_entry() -> None:
    tables = torch.arange(10.0, device=DEVICE).view(1, 1, 1, 2, 5)
    codes = torch.tensor([[[[255, 1], [4, 200]]]], dtype=torch.uint8, device=DEVICE)
    assert cuda.lookup_logits(tables, codes).flatten().tolist() == [4 + 6, 4 + 9]


def is_fewest(weights: list[float], kept: list[bool], least: float) -> bool:
    """Return True if kept weights add up to share ``least``, but not without the smallest of them, up to rounding."""
    total = math.fsum(weights)
    has = math.fsum(weight for weight, here in zip(weights, kept, strict=True) if here)
    smallest = min(weight for weight, here in zip(weights, kept, strict=True) if here)
    largest_out = max((weight for weight, here in zip(weights, kept, strict=True) if not here), default=0.0)
    enough, no_more = has >= least * total * (1 - 1e-6), has - smallest < least * total * (1 + 1e-6)
    return enough and no_more and largest_out <= smallest


@pytest.mark.parametrize("least", [0.001, 0.3, 0.9, 0.999])
@pytest.mark.parametrize(
    ("lists", "entries", "sharpness"), [(3, 1, 1.0), (4, 700, 0.1), (4, 1300, 3.0), (2, 512, 20.0)]
)
def test_the_fewest_entries_that_have_the_share_are_kept(
    lists: int, entries: int, sharpness: float, least: float
) -> None:
    drawn = torch.randn(2, lists, entries, generator=seeded(entries))
    weights = (sharpness * drawn).softmax(dim=2)
    kept = cuda.cumulative_share(weights.to(DEVICE), least).cpu()
    for of_list, found in zip(weights.flatten(0, 1).tolist(), kept.flatten(0, 1).tolist(), strict=True):
        assert is_fewest(of_list, found, least)
    # up to one entry at the edge, by rounding, the result equals the reference's
    differs = kept != reference_weights.cumulative_share(weights, least)
    assert differs.sum(dim=2).max() <= 1


@pytest.mark.parametrize("entries", [64, 1100])
def test_of_equal_weights_the_first_are_kept(entries: int) -> None:
    weights = torch.full((2, entries), 0.25, device=DEVICE)
    weights[1, 40] = 1.0
    kept = cuda.cumulative_share(weights, 0.5).cpu()
    assert torch.equal(kept, reference_weights.cumulative_share(weights.cpu(), 0.5))
    assert kept[0].tolist() == [entry < entries // 2 for entry in range(entries)]


def test_all_of_the_mass_keeps_every_weight_above_zero_and_none_of_nothing() -> None:
    weights = torch.tensor([[0.5, 0.0, 1e-30, 0.2], [0.0] * 4, [math.nan, 0.0, 2.0, 0.0]], device=DEVICE)
    assert cuda.cumulative_share(weights, 1.0).tolist() == [
        [True, False, True, True],
        [False] * 4,
        [False, False, True, False],
    ]
    assert not cuda.cumulative_share(weights[1:2], 0.5).any()


def test_every_launch_keeps_the_same() -> None:
    weights = (2 * torch.randn(3, 900, generator=seeded(7))).softmax(dim=1).to(DEVICE)
    first = cuda.cumulative_share(weights, 0.7)
    assert all(torch.equal(cuda.cumulative_share(weights, 0.7), first) for _ in range(3))
