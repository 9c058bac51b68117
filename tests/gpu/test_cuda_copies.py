"""Copies of new tokens to staged pages, and of staged pages from and to the host pool."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded
from selection_cases import numbers

from sglang_hybrid.ops.cuda import host_memory
from sglang_hybrid.ops.cuda.copies import copy_runs, place_tokens, scatter_blocks
from sglang_hybrid.ops.cuda.digests import HostPool
from sglang_hybrid.protocol.region import SharedRegion

UNTOUCHED = 77.0
SHAPES = [(3, 64, torch.bfloat16), (8, 128, torch.float16), (2, 96, torch.bfloat16)]  # KV heads, head_dim


def pool_of(pages: int, heads: int, dim: int, dtype: torch.dtype) -> HostPool:
    shape = (pages, heads, BLOCK_TOKENS, dim)
    size = pages * heads * BLOCK_TOKENS * dim * dtype.itemsize
    memory = SharedRegion(SharedRegion.size_for(size, size))
    keys, values = (memory.take(shape, dtype).fill_(UNTOUCHED) for _ in range(2))
    return HostPool(host_memory.RegisteredRegion(memory), keys, values)


def random_pair(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, *shape, generator=seeded(seed)).to(DEVICE, dtype)
    return keys.contiguous(), values.contiguous()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("heads", "dim", "dtype"), SHAPES)
def test_tokens_are_placed_and_other_tokens_left_alone(heads: int, dim: int, dtype: torch.dtype, fused: bool) -> None:
    tokens, slots = 75, 6
    keys, values = random_pair((tokens, heads, dim), dtype)
    if fused:  # slices of the output of one projection
        together = torch.cat((keys, values), dim=1)
        keys, values = together[:, :heads], together[:, heads:]
    places = torch.randperm(slots * BLOCK_TOKENS, generator=seeded(2))[:tokens].int()
    places[[3, 50]] = -1
    places[7], places[8] = slots * BLOCK_TOKENS, -2
    key_slots = torch.full((slots, heads, BLOCK_TOKENS, dim), UNTOUCHED, dtype=dtype, device=DEVICE)
    value_slots = key_slots.clone()
    expected = key_slots.clone(), key_slots.clone()
    for token, place in enumerate(places.tolist()):
        if 0 <= place < slots * BLOCK_TOKENS:
            for part, new in zip(expected, (keys, values), strict=True):
                part[place // BLOCK_TOKENS, :, place % BLOCK_TOKENS] = new[token]
    refused = numbers(0, dtype=torch.int64)
    place_tokens(keys, values, places.to(DEVICE), key_slots, value_slots, refused=refused)
    torch.cuda.synchronize()
    assert torch.equal(key_slots, expected[0]) and torch.equal(value_slots, expected[1])
    assert int(refused) == 2


def test_tokens_that_are_not_contiguous_are_refused() -> None:
    keys, values = random_pair((5, 64, 2), torch.bfloat16)
    slots = torch.zeros(1, 2, BLOCK_TOKENS, 64, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="a token of keys must be contiguous"):
        place_tokens(keys.transpose(1, 2), values.transpose(1, 2), numbers(0, 1, 2, 3, 4), slots, slots)


@pytest.mark.parametrize("ctas", [1, 16])
@pytest.mark.parametrize(("heads", "dim", "dtype"), SHAPES)
def test_blocks_are_scattered_to_their_pages(heads: int, dim: int, dtype: torch.dtype, ctas: int) -> None:
    owners, slots, pages = 4, 2, 23
    pool = pool_of(pages, heads, dim, dtype)
    keys, values = random_pair((owners, heads, slots, BLOCK_TOKENS, dim), dtype)
    # different pages for every KV head
    chosen = torch.rand(heads, pages, generator=seeded(3)).argsort(dim=1)[:, : owners * slots]
    ids = chosen.view(heads, owners, slots).transpose(0, 1).contiguous().int()
    ids[0, 0, 0], ids[1, 0, 0], ids[2, 0, 0] = -1, pages, -2
    expected = pool.keys.clone(), pool.values.clone()
    for owner in range(owners):
        for head in range(heads):
            for slot in range(slots):
                if 0 <= (page := int(ids[owner, head, slot])) < pages:
                    expected[0][page, head] = keys[owner, head, slot].cpu()
                    expected[1][page, head] = values[owner, head, slot].cpu()
    refused = numbers(0, dtype=torch.int64)
    scatter_blocks(pool.region, pool.keys, pool.values, ids.to(DEVICE), keys, values, refused=refused, ctas=ctas)
    torch.cuda.synchronize()
    assert torch.equal(pool.keys, expected[0]) and torch.equal(pool.values, expected[1])
    assert int(refused) == 2  # page -1 means no page, and is not counted


def test_runs_of_pages_are_copied_both_ways() -> None:
    heads, dim, dtype = 2, 64, torch.bfloat16
    pool = pool_of(12, heads, dim, dtype)
    keys, values = random_pair((9, heads, BLOCK_TOKENS, dim), dtype)
    runs = torch.tensor([[3, 0, 4], [11, 6, 1], [0, 7, 2]], dtype=torch.int32)
    copy_runs(pool.region, pool.keys, pool.values, runs, keys, values, to_pool=True)
    torch.cuda.synchronize()
    pages, slots = torch.tensor([3, 4, 5, 6, 11, 0, 1]), torch.tensor([0, 1, 2, 3, 6, 7, 8])
    assert torch.equal(pool.keys[pages], keys.cpu()[slots]) and torch.equal(pool.values[pages], values.cpu()[slots])
    others = torch.tensor([2, 7, 8, 9, 10])
    assert (pool.keys[others] == UNTOUCHED).all() and (pool.values[others] == UNTOUCHED).all()

    back = torch.zeros_like(keys), torch.zeros_like(values)
    copy_runs(pool.region, pool.keys, pool.values, runs, *back, to_pool=False)
    torch.cuda.synchronize()
    assert torch.equal(back[0].cpu()[slots], keys.cpu()[slots]) and torch.equal(
        back[1].cpu()[slots], values.cpu()[slots]
    )
    assert not back[0][4:6].any() and not back[1][4:6].any()


@pytest.mark.parametrize("run", [(10, 0, 3), (-1, 0, 2), (0, 8, 2), (0, -1, 1), (0, 0, -1), (2**31 - 1, 0, 2**31 - 1)])
def test_runs_out_of_bounds_are_refused_before_anything_is_copied(run: tuple[int, int, int]) -> None:
    pool = pool_of(12, 1, 64, torch.bfloat16)
    keys, values = random_pair((9, 1, BLOCK_TOKENS, 64), torch.bfloat16)
    runs = torch.tensor([[0, 0, 1], run], dtype=torch.int32)
    with pytest.raises((RuntimeError, AssertionError)):
        copy_runs(pool.region, pool.keys, pool.values, runs, keys, values, to_pool=True)
    torch.cuda.synchronize()
    assert (pool.keys == UNTOUCHED).all()
