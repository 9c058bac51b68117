"""Numbers that kernels store in an FP8 pool and read from it, compared one by one with the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded
from selection_cases import Shape, numbers, random_layer
from test_cuda_digests import assert_summaries, blank, region_pool

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.attention import attend_slots
from sglang_hybrid.ops.cuda.copies import gather_blocks, place_tokens, scatter_blocks
from sglang_hybrid.ops.cuda.digests import SlotTable, append, digest_pages
from sglang_hybrid.ops.reference import FP8

HALVES = [torch.bfloat16, torch.float16]
LAYERS = [
    Shape(batch=3, heads=2, group=1, dim=128, channels=32, max_blocks=4, compact=True),
    Shape(batch=3, heads=1, group=1, dim=64, channels=0, max_blocks=4, dtype=torch.float16),
]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that FP8 numbers have the same bytes; NaN may have any bytes."""
    found, expected = found.cpu(), expected.cpu()  # pools are in host memory
    nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    assert torch.equal(found.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])


def every_byte() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_of_16_bits_is_staged_as_the_nearest_of_fp8(dtype: torch.dtype) -> None:
    keys = torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16).view(dtype).view(512, 2, 64)
    values = keys.flip(0).contiguous()
    slots = [torch.zeros(16, 2, BLOCK_TOKENS, 64, dtype=FP8, device=DEVICE) for _ in range(2)]
    place_tokens(keys, values, torch.arange(512, dtype=torch.int32, device=DEVICE), *slots)
    torch.cuda.synchronize()
    for part, tokens in zip(slots, (keys, values), strict=True):
        assert_same(part.transpose(1, 2).reshape(512, 2, 64), reference.to_stored(tokens, FP8))


@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_new_tokens_reach_slots_pool_and_digests_as_they_are_stored(shape: Shape) -> None:
    lengths = [1, 40, 3 * BLOCK_TOKENS]
    case = random_layer(shape, 1, lengths)
    pool = region_pool(case.keys.shape[0], shape.heads, shape.dim, FP8)
    pool.keys.copy_(case.keys * 60)
    pool.values.copy_(case.keys)
    table = SlotTable(torch.full((shape.rows, shape.heads, 4), -1, dtype=torch.int32, device=DEVICE), 1, 1)
    of_slots = (*table.positions.shape, BLOCK_TOKENS, shape.dim)
    key_slots, value_slots = (torch.zeros(of_slots, dtype=FP8, device=DEVICE) for _ in range(2))
    keys, values = torch.randn(2, shape.batch, shape.heads, shape.dim, generator=seeded(2)).to(DEVICE, shape.dtype)
    # beyond the largest number, between the smallest ones, infinity and NaN
    odd = [1e4, -1e4, 448, 464, 480, 2**-9, 2**-10, 3 * 2**-10, -(2**-10), 2**-11, torch.inf, -torch.inf, torch.nan, 17]
    values[:, 0, : len(odd)] = torch.tensor(odd, device=DEVICE)
    keys[1, 0, : len(odd)] = torch.tensor(odd, device=DEVICE)
    digests = replace(blank(case.digests), pool=FP8)
    append(digests, table, case.step, keys, values, key_slots, value_slots, pool)
    torch.cuda.synchronize()

    tails = [(length - 1) // BLOCK_TOKENS for length in lengths]
    pages = torch.stack([case.step.page_table[entry, tail] for entry, tail in enumerate(tails)]).long()
    filled = torch.tensor([(length - 1) % BLOCK_TOKENS + 1 for length in lengths], device=DEVICE)
    for entry, row in enumerate(case.step.row_of.tolist()):
        last = int(filled[entry]) - 1
        assert_same(pool.keys[pages[entry], :, last], reference.to_stored(keys[entry], FP8))
        assert_same(pool.values[pages[entry], :, last], reference.to_stored(values[entry], FP8))
        for head in range(shape.heads):
            (slot,) = (table.positions[row, head] == tails[entry]).nonzero().flatten().tolist()
            for slots, part in ((key_slots, pool.keys), (value_slots, pool.values)):
                assert_same(slots[row, head, slot, : last + 1], part[pages[entry], head, : last + 1])
    untouched = torch.ones(len(case.keys), dtype=torch.bool, device=DEVICE).index_fill(0, pages, False)
    assert_summaries(digests, pool.keys[pages.cpu()].to(DEVICE, shape.dtype), pages, filled, untouched)


@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_pages_are_summarised_by_what_they_store(shape: Shape) -> None:
    case = random_layer(shape, 3)
    pages = torch.tensor([5, 0, 9, 2], device=DEVICE)
    filled = torch.tensor([1, 32, 17, 31], device=DEVICE)
    keys = reference.to_stored(case.keys[pages] * 100, FP8)
    found = replace(blank(case.digests), pool=FP8)
    digest_pages(found, keys, pages.int(), filled.int())
    untouched = torch.ones(len(case.keys), dtype=torch.bool, device=DEVICE).index_fill(0, pages, False)
    assert_summaries(found, keys.to(shape.dtype), pages, filled, untouched)


# -- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_of_fp8_is_read_as_what_it_is(dtype: torch.dtype) -> None:
    """For a row with one token, the output is the token's value and the LSE is the logit of its key."""
    rows, dim = 4, 64
    of_slots = (rows, dim, 1, BLOCK_TOKENS, dim)  # the query of KV head h selects channel h
    keys, values = (torch.full(of_slots, torch.nan, device=DEVICE).to(FP8) for _ in range(2))
    numbers_of_row = every_byte().view(rows, dim)
    keys[:, :, 0, 0] = torch.zeros(dim, dtype=FP8, device=DEVICE)
    for head in range(dim):
        keys[:, head, 0, 0, head] = numbers_of_row[:, head]
    values[:, :, 0, 0] = numbers_of_row[:, None]
    query = torch.eye(dim, dtype=dtype, device=DEVICE).expand(rows, -1, -1).contiguous()
    positions = torch.zeros(rows, dim, 1, dtype=torch.int32, device=DEVICE)
    ones = torch.ones(rows, dtype=torch.int32, device=DEVICE)
    row_of = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    out, lse = attend_slots(query, keys, values, positions, ones, row_of, 0.5)
    torch.cuda.synchronize()
    expected = numbers_of_row.float()
    finite = expected.isfinite()
    torch.testing.assert_close(lse[finite], expected[finite] * 0.5, rtol=1e-6, atol=1e-7)
    assert not lse[~finite].isfinite().any()
    for head in torch.tensor([0, 17, 63]).tolist():
        whole = finite[:, head]  # rows whose key is finite
        assert torch.equal(out[whole, head].nan_to_num(nan=777), expected[whole].nan_to_num(nan=777))


@pytest.mark.parametrize("dim", [64, 128])
def test_queries_of_any_size_are_asked_as_they_are(dim: int) -> None:
    """Products over FP8 are computed in float16, but bfloat16 queries may be far beyond the range of float16."""
    batch, group, tokens = 3, 5, 3 * BLOCK_TOKENS
    random = seeded(dim)
    query = torch.randn(batch, group, dim, generator=random)
    query *= 2.0 ** torch.randint(-20, 1, query.shape, generator=random)  # channels of all sizes
    query *= torch.tensor([2.0**-90, 1.0, 2.0**90])[:, None, None]
    query[1, 2] = 0
    query = query.to(DEVICE, torch.bfloat16)
    keys, values = torch.randn(2, batch, 1, 3, BLOCK_TOKENS, dim, generator=random).to(DEVICE, FP8)
    positions = torch.arange(3, dtype=torch.int32, device=DEVICE).expand(batch, 1, 3).contiguous()
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE)
    row_of = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    for row, scale in enumerate([2.0**88, 0.3, 2.0**-90]):
        out, lse = attend_slots(query, keys, values, positions, lengths, row_of, scale)
        torch.cuda.synchronize()
        logits = query[row].double() @ keys[row].flatten(0, 2).double().T * scale
        expected = logits.softmax(dim=-1) @ values[row].flatten(0, 2).double()
        torch.testing.assert_close(lse[row].double(), logits.logsumexp(dim=-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out[row].double(), expected, rtol=2e-3, atol=2e-3)


def test_blocks_are_copied_byte_by_byte() -> None:
    pool = region_pool(7, 2, 64, FP8)
    every = torch.arange(pool.keys.numel()).to(torch.uint8).view(FP8).view_as(pool.keys)
    pool.keys.copy_(every)
    pool.values.copy_(every.flip(0))
    pages = torch.tensor([6, 0, 3, 5], dtype=torch.int32, device=DEVICE).view(2, 1, 2).expand(2, 2, 2).contiguous()
    slots = [torch.zeros(2, 2, 2, BLOCK_TOKENS, 64, dtype=FP8, device=DEVICE) for _ in range(2)]
    gather_blocks(pool.region, pool.keys, pool.values, pages, *slots)
    torch.cuda.synchronize()
    for part, kept in zip(slots, (pool.keys, pool.values), strict=True):
        found = part.transpose(1, 2).flatten(0, 1).cpu().view(torch.uint8)
        assert torch.equal(found, kept[[6, 0, 3, 5]].view(torch.uint8))
    back = region_pool(7, 2, 64, FP8)
    refused = numbers(0, dtype=torch.int64)
    scatter_blocks(back.region, back.keys, back.values, pages, *slots, refused=refused)
    torch.cuda.synchronize()
    assert torch.equal(back.values[[6, 0, 3, 5]].view(torch.uint8), pool.values[[6, 0, 3, 5]].view(torch.uint8))
    assert int(refused) == 0 and not back.keys[1].view(torch.uint8).any()
