"""Slots that keep codes of 8 bits: how they are written, attended and digested, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, BlockSlots, SlotCase, random_slots, seeded
from cuda_cases import Shape as SlotShape
from selection_cases import Shape, numbers, random_layer
from test_cuda_attention import LSE_TOLERANCE, attended, large
from test_cuda_digests import assert_summaries, blank, region_pool

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.copies import gather_blocks
from sglang_hybrid.ops.cuda.digests import SlotTable, append
from sglang_hybrid.ops.cuda.slot_codes import SlotCodes, no_factors

ATTENDED = [
    SlotShape(batch=3, heads=2, group=5, dim=128, slots=9),
    SlotShape(batch=2, heads=1, group=16, dim=64, slots=41, dtype=torch.float16),
    large(SlotShape(batch=64, heads=8, group=5, dim=128, slots=68)),
    large(SlotShape(batch=4, heads=2, group=16, dim=128, slots=256)),
]


def random_steps(heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Return steps ``[2, heads, dim]`` of channels of very different sizes."""
    sizes = 2.0 ** torch.randint(-6, 7, (2, heads, dim), generator=seeded(seed))
    return (sizes * (1 + torch.rand(2, heads, dim, generator=seeded(seed + 1))) / 40).to(DEVICE)


def random_codes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(seed)).to(DEVICE)


def random_factors(slots: torch.Tensor, seed: int) -> torch.Tensor:
    return (0.1 + 0.9 * torch.rand(*slots.shape[:3], 2, BLOCK_TOKENS, generator=seeded(seed))).half().to(DEVICE)


def numbers_of(codes: list[torch.Tensor], of_kernel: SlotCodes) -> list[torch.Tensor]:
    """Return the numbers that keys and values ``[rows, H, S, 32, D]`` of codes stand for."""
    factors = of_kernel.factors.unbind(3)
    return [reference.of_codes(codes[i], of_kernel.steps[i][:, None], factors[i]) for i in range(2)]


# -- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ATTENDED, ids=str)
def test_codes_are_attended_as_the_numbers_that_they_stand_for(shape: SlotShape) -> None:
    steps = random_steps(shape.heads, shape.dim)
    case = random_slots(shape, seed=1)
    codes = [random_codes(tuple(case.resident.keys.shape), seed) for seed in (2, 3)]
    of_kernel = SlotCodes(reference.with_reciprocals(steps), random_factors(codes[0], 9))
    plain = numbers_of(codes, of_kernel)
    query = case.query.float() / steps[0].repeat_interleave(shape.group, dim=0)  # logits of ordinary size
    case = replace(case, query=(query / 30).to(shape.dtype))
    numbers_of_codes = BlockSlots(plain[0], plain[1], case.resident.positions)
    expected = replace(case, query=case.query.float(), resident=numbers_of_codes).expected()
    coded = replace(case, resident=BlockSlots(codes[0], codes[1], case.resident.positions))
    found = attended(coded, codes=of_kernel)
    torch.testing.assert_close(found[1], expected[1], atol=LSE_TOLERANCE, rtol=LSE_TOLERANCE)
    sizes = steps[1].repeat_interleave(shape.group, dim=0)  # errors are relative to the step of the channel
    torch.testing.assert_close(found[0] / sizes, expected[0] / sizes, atol=0.15, rtol=2e-3)


def test_queries_of_any_size_are_asked_as_they_are() -> None:
    shape = SlotShape(batch=2, heads=1, group=3, dim=64, slots=3)
    steps = random_steps(1, 64) * torch.tensor([2.0**60, 1.0], device=DEVICE)[:, None, None]
    case: SlotCase = random_slots(shape, seed=5)
    codes = [random_codes(tuple(case.resident.keys.shape), seed) for seed in (6, 7)]
    query = (case.query.float() / steps[0] / 30).to(shape.dtype)
    of_kernel = SlotCodes(reference.with_reciprocals(steps), random_factors(codes[0], 9))
    plain = numbers_of(codes, of_kernel)
    numbers_of_codes = BlockSlots(plain[0], plain[1], case.resident.positions)
    expected = replace(case, query=query.float(), resident=numbers_of_codes).expected()
    coded = BlockSlots(codes[0], codes[1], case.resident.positions)
    out, lse = attended(replace(case, query=query, resident=coded), codes=of_kernel)
    torch.testing.assert_close(lse, expected[1], atol=LSE_TOLERANCE, rtol=LSE_TOLERANCE)
    torch.testing.assert_close(out / steps[1], expected[0] / steps[1], atol=0.15, rtol=2e-3)


# -- writing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_blocks_of_the_pool_become_codes(dtype: torch.dtype) -> None:
    heads, dim = 2, 64
    steps = random_steps(heads, dim)
    pool = region_pool(7, heads, dim, dtype)
    tokens = torch.randn(2, 7, heads, BLOCK_TOKENS, dim, generator=seeded(1)) * steps.cpu()[:, None, :, None] * 50
    tokens[0, 3, 1, 5, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    pool.keys.copy_(tokens[0])
    pool.values.copy_(tokens[1])
    pages = numbers(6, 3, 0, 5).view(2, 1, 2).expand(2, heads, 2).contiguous()
    slots = [torch.zeros(2, heads, 2, BLOCK_TOKENS, dim, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    of_kernel = SlotCodes(reference.with_reciprocals(steps), no_factors(slots[0]))
    gather_blocks(pool.region, pool.keys, pool.values, pages, slots[0], slots[1], codes=of_kernel)
    torch.cuda.synchronize()
    for i, kept in enumerate((pool.keys, pool.values)):
        expected, factors = reference.to_codes(kept[[6, 3, 0, 5]].to(DEVICE), steps[i])
        assert torch.equal(slots[i].transpose(1, 2).flatten(0, 1), expected)
        assert torch.equal(of_kernel.factors[..., i, :].transpose(1, 2).flatten(0, 1), factors)
        assert int(expected.min()) >= 1


LAYERS = [
    Shape(batch=3, heads=2, group=1, dim=128, channels=32, max_blocks=4, compact=True),
    Shape(batch=3, heads=1, group=1, dim=64, channels=0, max_blocks=4, dtype=torch.float16),
]


@pytest.mark.parametrize("has_slots", [True, False])
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_new_tokens_reach_the_pool_as_they_are_and_slots_as_codes(shape: Shape, has_slots: bool) -> None:
    """Digests are of what the slot's codes stand for."""
    lengths = [1, 40, 3 * BLOCK_TOKENS]
    case = random_layer(shape, 1, lengths)
    steps = random_steps(shape.heads, shape.dim) / 4
    pool = region_pool(case.keys.shape[0], shape.heads, shape.dim, shape.dtype)
    pool.keys.copy_(case.keys)
    pool.values.copy_(-case.keys)
    table = SlotTable(torch.full((shape.rows, shape.heads, 4), -1, dtype=torch.int32, device=DEVICE), 1, 1)
    tails = [(length - 1) // BLOCK_TOKENS for length in lengths]
    of_slots = (*table.positions.shape, BLOCK_TOKENS, shape.dim)
    key_slots, value_slots = (torch.zeros(of_slots, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    pages = torch.stack([case.step.page_table[entry, tail] for entry, tail in enumerate(tails)]).long()
    of_kernel = SlotCodes(reference.with_reciprocals(steps), no_factors(key_slots))
    every = ((key_slots, pool.keys), (value_slots, pool.values))
    if has_slots:  # as after the step before
        for entry, row in enumerate(case.step.row_of.tolist()):
            table.positions[row, :, 2] = tails[entry]
            for i, (slots, part) in enumerate(every):
                slots[row, :, 2], of_kernel.factors[row, :, 2, i] = reference.to_codes(
                    part[pages[entry]].to(DEVICE), steps[i]
                )
    keys, values = torch.randn(2, shape.batch, shape.heads, shape.dim, generator=seeded(2)).to(DEVICE, shape.dtype)
    digests = blank(case.digests)
    append(digests, table, case.step, keys, values, key_slots, value_slots, pool, codes=of_kernel)
    torch.cuda.synchronize()

    filled = torch.tensor([(length - 1) % BLOCK_TOKENS + 1 for length in lengths], device=DEVICE)
    coded = torch.zeros(len(lengths), shape.heads, BLOCK_TOKENS, shape.dim, dtype=shape.dtype, device=DEVICE)
    for entry, row in enumerate(case.step.row_of.tolist()):
        last = int(filled[entry]) - 1
        assert torch.equal(pool.keys[pages[entry], :, last], keys[entry].cpu())
        assert torch.equal(pool.values[pages[entry], :, last], values[entry].cpu())
        for head in range(shape.heads):
            (slot,) = (table.positions[row, head] == tails[entry]).nonzero().flatten().tolist()
            for i, (slots, part) in enumerate(every):
                expected, factors = reference.to_codes(part[pages[entry]].to(DEVICE), steps[i])
                assert torch.equal(slots[row, head, slot, : last + 1], expected[head, : last + 1])
                assert torch.equal(of_kernel.factors[row, head, slot, i, : last + 1], factors[head, : last + 1])
        codes, factors = reference.to_codes(pool.keys[pages[entry]].to(DEVICE), steps[0])
        coded[entry] = reference.of_codes(codes, steps[0], factors)
    untouched = torch.ones(len(case.keys), dtype=torch.bool, device=DEVICE).index_fill(0, pages, False)
    assert_summaries(digests, coded, pages, filled, untouched)
