"""The mean of a row's values, the LSE of near blocks, and what they add to merged attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, BlockSlots, Shape, SlotCase, random_partial, random_slots, seeded
from test_cuda_digests import region_pool
from test_cuda_slot_codes import numbers_of, random_codes, random_factors, random_steps

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.attention import merge
from sglang_hybrid.ops.cuda.digests import HostPool, SlotTable
from sglang_hybrid.ops.cuda.left_out import LeftOut, mean_values, near_lse
from sglang_hybrid.ops.cuda.slot_codes import SlotCodes
from sglang_hybrid.ops.cuda.step import Step

SINK, RECENT = 1, 2
SHAPES = [
    Shape(batch=3, heads=2, group=5, dim=128, slots=9),
    Shape(batch=2, heads=1, group=16, dim=64, slots=41, dtype=torch.float16),
    Shape(batch=2, heads=2, group=3, dim=96, slots=7),
    Shape(batch=1, heads=1, group=2, dim=256, slots=5),
    Shape(batch=2, heads=2, group=9, dim=64, slots=12, pool=reference.FP8),
]


# -- means of values -------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Rows with pages in a pool of random values."""

    pool: HostPool
    step: Step

    @property
    def counts(self) -> torch.Tensor:
        return -(-self.step.lengths.long() // BLOCK_TOKENS)

    def means(self) -> torch.Tensor:
        """Return ``reference.sampled_mean``, on the host: the pool is there."""
        pages, counts = self.step.page_table.long().cpu(), self.counts.cpu()
        return reference.sampled_mean(self.pool.values, pages, counts, SINK, RECENT).to(DEVICE)


def random_rows(shape: Shape, lengths: list[int], pages: int = 90) -> Rows:
    random = seeded(3)
    pool = region_pool(pages, shape.heads, shape.dim, shape.pool or shape.dtype)
    pool.values.copy_((torch.randn(pool.values.shape, generator=random) + 1).to(pool.values.dtype))
    most = max(-(-length // BLOCK_TOKENS) for length in lengths)
    table = torch.randint(0, pages, (len(lengths), most), generator=random).int().to(DEVICE)
    row_of = torch.randperm(shape.pool_rows, generator=random)[: len(lengths)].int().to(DEVICE)
    return Rows(pool, Step(table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), row_of))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_mean_is_of_blocks_all_over_the_row(shape: Shape) -> None:
    shape = replace(shape, batch=4)
    case = random_rows(shape, [70 * BLOCK_TOKENS - 5, 3, 20 * BLOCK_TOKENS, 37 * BLOCK_TOKENS + 1])
    means = torch.full((shape.pool_rows, shape.heads, shape.dim), 7.0, device=DEVICE)
    mean_values(case.pool, case.step, means, shape.dtype, sink=SINK, recent=RECENT)
    rows = case.step.row_of.long()
    torch.testing.assert_close(means[rows], case.means(), atol=1e-4, rtol=1e-4)
    assert not means[rows[1]].any()  # all of this row is near
    others = torch.ones(shape.pool_rows, dtype=torch.bool, device=DEVICE).index_fill(0, rows, False)
    assert (means[others] == 7.0).all()


def test_entries_that_are_not_named_keep_their_mean_and_pages_beyond_the_pool_do_not_count() -> None:
    shape = Shape(batch=2, heads=2, group=1, dim=64, slots=4)
    case = random_rows(shape, [12 * BLOCK_TOKENS, 12 * BLOCK_TOKENS])
    means = torch.full((shape.pool_rows, shape.heads, shape.dim), 7.0, device=DEVICE)
    only = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    # blocks 1 to 8 are candidates; of these only 4 has a page
    pages = case.step.page_table.clone()
    pages[1, 1:4], pages[1, 5:9] = -1, 2**30
    step = replace(case.step, page_table=pages)
    mean_values(case.pool, step, means, shape.dtype, sink=SINK, recent=RECENT, only=only)
    first, second = case.step.row_of.long()
    assert (means[first] == 7.0).all()
    expected = case.pool.values[int(pages[1, 4])].float().mean(dim=1).to(DEVICE)
    torch.testing.assert_close(means[second], expected, atol=1e-4, rtol=1e-4)


# -- near blocks -----------------------------------------------------------------------------


def near_of(case: SlotCase, bias: torch.Tensor) -> torch.Tensor:
    """Return the expected LSE: of the slots that hold near blocks."""
    counts = -(-case.lengths.long() // BLOCK_TOKENS)
    kept = case.resident
    near = reference.is_forced(kept.positions.long(), counts, SINK, RECENT)
    only = BlockSlots(kept.keys, kept.values, kept.positions.masked_fill(~near, reference.NO_BLOCK))
    return replace(case, resident=only).expected(bias, SINK, RECENT)[1]


def computed(
    case: SlotCase, bias: torch.Tensor, codes: SlotCodes | None = None, begins: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    shape, rows = case.shape, case.row_of.long()
    longest = int(case.lengths.max())
    pool = random_rows(shape, [longest] * shape.batch)
    step = Step(pool.step.page_table, case.lengths[rows], case.row_of)
    means = torch.zeros(shape.pool_rows, shape.heads, shape.dim, device=DEVICE)
    found = near_lse(
        case.query, case.resident.keys, SlotTable(case.resident.positions, SINK, RECENT), step, shape.scale, bias,
        torch.full((shape.batch, shape.heads * shape.group), 7.0, device=DEVICE), pool=pool.pool, means=means,
        begins=torch.full((shape.batch,), int(begins), dtype=torch.int32, device=DEVICE), codes=codes,
    )  # fmt: skip
    return found, means, Rows(pool.pool, step)


def random_bias(shape: Shape) -> torch.Tensor:
    return -3 * torch.rand(shape.pool_rows, shape.heads, shape.group, generator=seeded(7)).to(DEVICE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_lse_of_near_blocks_has_their_bias(shape: Shape) -> None:
    case, bias = random_slots(shape, 2), random_bias(shape)
    found, means, _ = computed(case, bias)
    torch.testing.assert_close(found, near_of(case, bias), atol=2e-3, rtol=2e-3)
    assert not means.any()


def test_rows_that_begin_get_their_mean() -> None:
    shape = SHAPES[0]
    case = random_slots(shape, 2)
    _, means, rows = computed(case, random_bias(shape), begins=True)
    torch.testing.assert_close(means[case.row_of.long()], rows.means(), atol=1e-4, rtol=1e-4)


def test_rows_that_have_doubled_get_another_mean() -> None:
    shape = SHAPES[0]
    case = random_slots(replace(shape, slots=40), 2)
    first, second, third = case.row_of.long()
    case.lengths[first], case.lengths[second], case.lengths[third] = 1025, 1026, 257
    _, means, rows = computed(case, random_bias(shape))
    torch.testing.assert_close(means[first], rows.means()[0], atol=1e-4, rtol=1e-4)
    assert not means[second].any() and not means[third].any()


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_the_lse_of_codes_is_that_of_their_numbers(shape: Shape) -> None:
    steps, case, bias = random_steps(shape.heads, shape.dim), random_slots(shape, 1), random_bias(shape)
    codes = [random_codes(tuple(case.resident.keys.shape), seed) for seed in (2, 3)]
    of_kernel = SlotCodes(reference.with_reciprocals(steps), random_factors(codes[0], 9))
    keys, values = numbers_of(codes, of_kernel)
    query = case.query.float() / steps[0].repeat_interleave(shape.group, dim=0)  # logits of ordinary size
    case = replace(case, query=(query / 30).to(shape.dtype))
    plain = replace(case, query=case.query.float(), resident=BlockSlots(keys, values, case.resident.positions))
    coded = replace(case, resident=BlockSlots(codes[0], codes[1], case.resident.positions))
    torch.testing.assert_close(computed(coded, bias, of_kernel)[0], near_of(plain, bias), atol=2e-2, rtol=2e-2)


# -- merging ---------------------------------------------------------------------------------


def random_left_out(batch: int, heads: int, group: int, dim: int) -> LeftOut:
    random, rows = seeded(5), batch + 3
    return LeftOut(
        near_lse=(2 * torch.randn(batch, heads * group, generator=random)).to(DEVICE),
        weights=torch.rand(rows, heads, group, generator=random).to(DEVICE),
        means=torch.randn(rows, heads, dim, generator=random).to(DEVICE),
        row_of=torch.randperm(rows, generator=random)[:batch].int().to(DEVICE),
    )


def test_merging_adds_the_mean_by_the_candidates_part() -> None:
    batch, heads, group, dim = 5, 2, 3, 64
    left = random_left_out(batch, heads, group, dim)
    first, second = (random_partial((batch, heads * group, dim), seed) for seed in (1, 2))
    out = torch.empty(batch, heads * group, dim, device=DEVICE)
    merge(first, second, out=out, left_out=left)
    plain, lse = reference.merge(*first, *second)
    rows = left.row_of.long()
    expected = reference.with_left_out(plain, lse, left.near_lse, left.weights[rows], left.means[rows])
    expected = torch.where(lse[..., None] > -torch.inf, expected, plain)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(out, plain)


def test_without_candidates_or_weight_no_bit_changes() -> None:
    batch, heads, group, dim = 5, 2, 3, 64
    left = random_left_out(batch, heads, group, dim)
    first, second = (random_partial((batch, heads * group, dim), seed) for seed in (1, 2))
    plain, found = torch.empty(2, batch, heads * group, dim, device=DEVICE)
    lse = torch.empty(batch, heads * group, device=DEVICE)
    merge(first, second, out=plain, lse=lse)
    for nothing in (replace(left, near_lse=lse), replace(left, weights=torch.zeros_like(left.weights))):
        merge(first, second, out=found, left_out=nothing)
        assert torch.equal(found, plain)
