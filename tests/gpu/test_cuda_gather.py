"""Copies of blocks from the host pool to slots on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.copies import gather_blocks
from sglang_hybrid.ops.cuda.host_memory import RegisteredRegion
from sglang_hybrid.protocol.region import SharedRegion

UNTOUCHED = 77.0


class Pool:
    """Random keys and values of one layer in registered host memory."""

    def __init__(self, pages: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
        shape = (pages, heads, BLOCK_TOKENS, dim)
        size = pages * heads * BLOCK_TOKENS * dim * dtype.itemsize
        self.memory = SharedRegion(SharedRegion.size_for(size, size))
        self.keys, self.values = (self.memory.take(shape, dtype) for _ in range(2))
        for seed, part in enumerate((self.keys, self.values)):
            part.copy_(torch.randn(shape, generator=seeded(seed)))
        self.region = RegisteredRegion(self.memory)

    def slots(self, owners: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (owners, self.keys.shape[1], slots, *self.keys.shape[2:])
        keys = torch.full(shape, UNTOUCHED, dtype=self.keys.dtype, device=DEVICE)
        return keys, keys.clone()


@pytest.fixture(params=[(50, 3, 64), (70, 8, 128), (20, 2, 96), (33, 2, 256)], ids=str)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = Pool(*request.param)
    yield made
    made.region.close()
    made.memory.close()


def device(*numbers: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("ctas", [1, 7, 32])
def test_listed_blocks_arrive_and_other_slots_are_left_alone(pool: Pool, ctas: int) -> None:
    pages, heads = pool.keys.shape[:2]
    owners, slots, active = 5, 6, 3
    ids = torch.randint(-1, pages, (owners, heads, slots), generator=seeded(ctas))
    keys, values = pool.slots(owners, slots)
    refused = device(0, dtype=torch.int64)
    gather_blocks(
        pool.region, pool.keys, pool.values, ids.int().to(DEVICE), keys, values,
        active_rows=device(active), refused=refused, ctas=ctas,
    )  # fmt: skip
    there = ids != reference.NO_BLOCK
    there[active:] = False
    for copied, part in ((keys.cpu(), pool.keys), (values.cpu(), pool.values)):
        expected = reference.gather_blocks(part, ids).masked_fill(~there[..., None, None], UNTOUCHED)
        assert torch.equal(copied, expected)
    assert int(refused) == 0


def test_a_list_with_destinations_is_copied_as_far_as_it_goes(pool: Pool) -> None:
    pages, heads = pool.keys.shape[:2]
    rows, slots, listed, count = 4, 5, 40, 33
    random = seeded(5)
    destinations = torch.randperm(rows * heads * slots, generator=random)[:listed]
    ids = torch.randint(0, pages, destinations.shape, generator=random)
    keys, values = pool.slots(rows, slots)
    count = min(count, len(destinations) - 1)
    gather_blocks(
        pool.region, pool.keys, pool.values, ids.int().to(DEVICE), keys, values,
        destinations=destinations.int().to(DEVICE), count=device(count),
    )  # fmt: skip
    expected = (
        torch.full(keys.shape, UNTOUCHED, dtype=keys.dtype).flatten(0, 2),
        torch.full_like(values.cpu(), UNTOUCHED).flatten(0, 2),
    )
    for page, slot in zip(ids[:count].tolist(), destinations[:count].tolist(), strict=True):
        head = slot // slots % heads
        expected[0][slot], expected[1][slot] = pool.keys[page, head], pool.values[page, head]
    assert torch.equal(keys.cpu().flatten(0, 2), expected[0])
    assert torch.equal(values.cpu().flatten(0, 2), expected[1])


def test_numbers_out_of_bounds_are_left_out_and_counted(pool: Pool) -> None:
    pages, heads = pool.keys.shape[:2]
    keys, values = pool.slots(2, 3)
    refused = device(0, dtype=torch.int64)
    last = 2 * heads * 3 - 1
    ids = device(1, pages, -2, -1, 2**31 - 1, 2, 3)
    destinations = device(0, 1, 2, 3, 4, last + 1, -1)
    gather_blocks(
        pool.region,
        pool.keys,
        pool.values,
        ids,
        keys,
        values,
        destinations=destinations,
        count=device(7),
        refused=refused,
    )
    assert int(refused) == 5  # page -1 means no block, and is not counted
    assert torch.equal(keys.flatten(0, 2)[0].cpu(), pool.keys[1, 0])
    assert (keys.flatten(0, 2)[1:] == UNTOUCHED).all() and (values.flatten(0, 2)[1:] == UNTOUCHED).all()


def test_a_count_beyond_the_list_reads_no_further(pool: Pool) -> None:
    keys, values = pool.slots(1, 2)
    gather_blocks(
        pool.region, pool.keys, pool.values, device(3), keys, values, destinations=device(1), count=device(1000)
    )
    assert torch.equal(keys[0, 0, 1].cpu(), pool.keys[3, 0])
    gather_blocks(
        pool.region, pool.keys, pool.values, device(4), keys, values, destinations=device(1), count=device(-1)
    )
    assert torch.equal(values[0, 0, 1].cpu(), pool.values[3, 0])


def test_a_graph_gathers_what_the_host_wrote_meanwhile(pool: Pool) -> None:
    pages, heads = pool.keys.shape[:2]
    keys, values = pool.slots(2, 4)
    ids = torch.zeros(2, heads, 4, dtype=torch.int32, device=DEVICE)
    gather_blocks(pool.region, pool.keys, pool.values, ids, keys, values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_blocks(pool.region, pool.keys, pool.values, ids, keys, values)
    for seed in range(20):
        torch.cuda.synchronize()
        pool.keys[seed] = seed
        chosen = torch.randint(0, pages, ids.shape, generator=seeded(seed))
        ids.copy_(chosen)
        graph.replay()
        assert torch.equal(keys.cpu(), reference.gather_blocks(pool.keys, chosen))
        assert torch.equal(values.cpu(), reference.gather_blocks(pool.values, chosen))


def test_tensors_outside_the_region_are_refused(pool: Pool) -> None:
    keys, values = pool.slots(1, 1)
    ids = torch.zeros(1, pool.keys.shape[1], 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="values is not a contiguous tensor of this region"):
        gather_blocks(pool.region, pool.keys, pool.values.clone(), ids, keys, values)


def test_the_time_of_every_launch_is_added(pool: Pool) -> None:
    pages = pool.keys.shape[0]
    ids = torch.randint(0, pages, (4, pool.keys.shape[1], 6), generator=seeded(1)).int().to(DEVICE)
    keys, values = pool.slots(4, 6)
    taken = device(0, dtype=torch.int64)
    times = []
    for _ in range(2):
        gather_blocks(pool.region, pool.keys, pool.values, ids, keys, values, taken_ns=taken, ctas=3)
        times.append(int(taken))
    assert 0 < times[0] < times[1] < 60e9  # on a busy machine, which emulates the GPU
