"""Whole rows in device memory: allocation of pages to rows, moves to slots, and attention over whole rows."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.attention import AttendWorkspace
from sglang_hybrid.ops.cuda.digests import DenseTable
from sglang_hybrid.ops.cuda.selection import RecallPlan
from sglang_hybrid.ops.cuda.step import Step, let_rows_go
from sglang_hybrid.ops.cuda.whole_requests import PageAllocator, StagedBlocks, attend_pages

ROWS, MAX_BLOCKS, HEADS = 9, 20, 2


def table_of(pages: int, max_blocks: int = MAX_BLOCKS, rows: int = ROWS) -> DenseTable:
    entries = torch.full((rows, max_blocks), -1, dtype=torch.int32, device=DEVICE)
    return DenseTable(entries, torch.zeros(rows, dtype=torch.int32, device=DEVICE), pages)


def step_of(lengths: dict[int, int], active: int | None = None, max_blocks: int = MAX_BLOCKS) -> Step:
    """Return a step of rows with these lengths. Row r has pages r * 100, r * 100 + 1, ... in the pool."""
    rows = torch.tensor(list(lengths), dtype=torch.int32)
    table = rows[:, None] * 100 + torch.arange(max_blocks, dtype=torch.int32)
    of_step = torch.tensor(list(lengths.values()), dtype=torch.int32)
    count = torch.tensor([len(lengths) if active is None else active], dtype=torch.int32, device=DEVICE)
    return Step(table.to(DEVICE), of_step.to(DEVICE), rows.to(DEVICE), count)


def held(allocator: PageAllocator) -> dict[int, list[int]]:
    table = allocator.table
    return {row: table.pages[row, :count].tolist() for row, count in enumerate(table.held.tolist()) if count}


def loaded(allocator: PageAllocator) -> set[tuple[int, int]]:
    """Return which pool pages must be loaded to which device pages. Assert that all KV heads of a page are listed."""
    count = int(allocator.load_count)
    pages, destinations = allocator.load_pages[:count].tolist(), allocator.load_destinations[:count].tolist()
    heads: dict[tuple[int, int], list[int]] = {}
    for page, destination in zip(pages, destinations, strict=True):
        heads.setdefault((page, destination // HEADS), []).append(destination % HEADS)
    assert all(sorted(found) == list(range(HEADS)) for found in heads.values())
    return set(heads)


def check(allocator: PageAllocator, lengths: dict[int, int]) -> None:
    found = held(allocator)
    assert {row: len(pages) for row, pages in found.items()} == {
        row: -(-length // BLOCK_TOKENS) for row, length in lengths.items()
    }
    pages = [page for of_row in found.values() for page in of_row]
    assert len(set(pages)) == len(pages), "two blocks have one page"
    free = allocator._free_pages[: int(allocator._free_count)].tolist()
    assert sorted(free + pages) == list(range(allocator.table.device_pages)), "pages are lost"


def test_rows_get_pages_when_they_come_and_give_them_back_when_they_leave() -> None:
    allocator = PageAllocator(table_of(30), HEADS)
    first = {3: 100, 5: 32, 1: 1}
    allocator.hold_rows(step_of(first))
    torch.cuda.synchronize()
    check(allocator, first)
    where = held(allocator)
    # row 1: its only token is the step's own, so there is nothing to load
    wanted = {(row * 100 + n, page) for row in (3, 5) for n, page in enumerate(where[row])}
    assert loaded(allocator) == wanted

    second = {5: 33, 8: 640, 3: 101}  # row 1 left, row 8 came, row 5 opens a block
    allocator.hold_rows(step_of(second))
    torch.cuda.synchronize()
    check(allocator, second)
    now = held(allocator)
    assert now[3] == where[3] and now[5][:1] == where[5], "rows that stay keep their pages"
    assert loaded(allocator) == {(800 + n, page) for n, page in enumerate(now[8])}


def test_a_row_of_another_request_is_loaded_anew() -> None:
    allocator = PageAllocator(table_of(10), HEADS)
    for _ in range(3):
        allocator.reset_rows(torch.tensor([2], device=DEVICE))
        allocator.hold_rows(step_of({2: 200, 4: 64}))
        torch.cuda.synchronize()
        check(allocator, {2: 200, 4: 64})
        assert {page // 100 for page, _ in loaded(allocator)} >= {2}
    assert {page // 100 for page, _ in loaded(allocator)} == {2}


def test_rows_that_find_no_pages_are_counted_and_lose_nothing() -> None:
    refused = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    allocator = PageAllocator(table_of(5), HEADS)
    allocator.hold_rows(step_of({2: 100}), refused)
    allocator.hold_rows(step_of({2: 100, 3: 70}), refused)
    torch.cuda.synchronize()
    assert int(refused) == 1
    check(allocator, {2: 100})
    allocator.forget_all()
    allocator.hold_rows(step_of({3: 160}), refused)
    torch.cuda.synchronize()
    check(allocator, {3: 160})


def test_padding_and_rows_that_are_not_active_hold_nothing() -> None:
    allocator = PageAllocator(table_of(10), HEADS)
    allocator.hold_rows(step_of({4: 40, 0: 1}))
    torch.cuda.synchronize()
    check(allocator, {4: 40})
    allocator.hold_rows(step_of({5: 70, 4: 40}, active=1))
    torch.cuda.synchronize()
    check(allocator, {5: 70})


def test_many_steps_of_random_traffic_lose_no_page() -> None:
    random = seeded(5)
    allocator = PageAllocator(table_of(60), HEADS)
    rows: dict[int, int] = {}
    for _ in range(40):
        for row in list(rows):
            rows[row] += 1
            if torch.rand((), generator=random) < 0.2:
                del rows[row]
        row = int(torch.randint(1, ROWS, (), generator=random))
        if row not in rows and sum(-(-length // 32) for length in rows.values()) < 45:
            rows[row] = int(torch.randint(1, 300, (), generator=random))
            allocator.reset_rows(torch.tensor([row], device=DEVICE))
        if not rows:
            continue
        allocator.hold_rows(step_of(rows))
        torch.cuda.synchronize()
        check(allocator, rows)


class Memory:
    """Memory of a layer that is used as slots and as pages, filled with random blocks, and a staging buffer."""

    def __init__(self, rows: int, slots: int, staged: int, dim: int = 64) -> None:
        self.rows, self.slots = rows, slots
        random = seeded(rows)
        shape = (2, rows, HEADS, slots, BLOCK_TOKENS, dim)
        self.parts = torch.randn(shape, generator=random).to(DEVICE, torch.bfloat16)
        self.before = self.parts.clone()
        empty = torch.full((2, staged, BLOCK_TOKENS, dim), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        self.staged = StagedBlocks(*empty)
        self.allocator = PageAllocator(table_of(rows * slots, rows=rows), HEADS)

    def plan(self, entries: list[tuple[int, int, int, int]], count: int | None = None) -> RecallPlan:
        """Return a plan. ``entries``: row, KV head, slot and position of each. Their pages are 1000 and following."""
        plan = RecallPlan(len(entries) + 5, DEVICE)
        listed = torch.tensor(entries, dtype=torch.int32)
        rows, heads, slots, positions = listed.unbind(1)
        plan.destinations[: len(entries)] = ((rows * HEADS + heads) * self.slots + slots).to(DEVICE)
        plan.positions[: len(entries)] = positions.to(DEVICE)
        plan.pages[: len(entries)] = 1000 + torch.arange(len(entries), dtype=torch.int32, device=DEVICE)
        plan.count.fill_(len(entries) if count is None else count)
        return plan

    def move(self, plan: RecallPlan, ctas: int = 3) -> None:
        self.allocator.move_to_slots(plan, self.parts[0], self.parts[1], self.staged, ctas=ctas)
        torch.cuda.synchronize()

    def expected(self, moved: dict[tuple[int, int, int], tuple[int, int]]) -> torch.Tensor:
        """Return the expected memory. ``moved``: (row, KV head, slot) gets the block of this (page, KV head)."""
        expected = self.before.clone()
        pages = self.before.view(2, self.rows * self.slots, HEADS, BLOCK_TOKENS, -1)
        for (row, head, slot), (page, of_head) in moved.items():
            expected[:, row, head, slot] = pages[:, page, of_head]
        return expected


@pytest.mark.parametrize("staged", [1000, 40, 1])
def test_held_blocks_of_a_plan_get_to_their_slots_though_these_are_the_memory_of_pages(staged: int) -> None:
    memory, random = Memory(rows=6, slots=16, staged=staged), seeded(8)
    lengths = {4: 600, 1: 600, 3: 500, 5: 600}
    memory.allocator.hold_rows(step_of(lengths))
    torch.cuda.synchronize()
    where = held(memory.allocator)
    entries = [
        (row, head, slot, position)
        for row, length in lengths.items()
        for head in range(HEADS)
        for slot, position in enumerate(torch.randperm(length // BLOCK_TOKENS, generator=random)[:14].tolist())
    ]
    entries = [entries[i] for i in torch.randperm(len(entries), generator=random).tolist()]
    plan = memory.plan(entries)
    memory.move(plan)
    moved = {entry[:3]: (where[entry[0]][entry[3]], entry[1]) for entry in entries[:staged]}
    assert torch.equal(memory.parts, memory.expected(moved))
    pages = plan.pages[: len(entries)].tolist()
    assert pages == [-1 if i < staged else 1000 + i for i in range(len(entries))]


def test_blocks_that_are_not_held_keep_their_page_and_nothing_is_moved_for_them() -> None:
    memory = Memory(rows=6, slots=16, staged=50)
    allocator = memory.allocator
    allocator.hold_rows(step_of({4: 100, 1: 64, 3: 70, 2: 200}))
    allocator.reset_rows(torch.tensor([1], device=DEVICE))  # a new request took row 1
    torch.cuda.synchronize()
    where = held(allocator)
    allocator.table.pages[2, 0] = memory.rows * memory.slots  # out of bounds, which the allocator never writes
    allocator.table.pages[2, 1] = -5
    entries = [
        (4, 0, 5, 3),
        (4, 1, 5, 4),
        (1, 0, 0, 0),
        (3, 1, 2, 2),
        (3, 0, 2, -1),
        (5, 0, 0, 0),
        (2, 0, 1, 0),
        (2, 1, 1, 1),
    ]
    plan = memory.plan([*entries, (3, 0, 9, 0)], count=len(entries))  # the last entry is beyond the plan's count
    memory.move(plan)
    moved = {(4, 0, 5): (where[4][3], 0), (3, 1, 2): (where[3][2], 1)}
    assert torch.equal(memory.parts, memory.expected(moved))
    assert (plan.pages[: len(entries) + 1] == -1).nonzero().flatten().tolist() == [0, 3]


def test_destinations_outside_the_slots_are_left_out() -> None:
    memory = Memory(rows=6, slots=16, staged=50)
    memory.allocator.hold_rows(step_of({4: 100}))
    torch.cuda.synchronize()
    plan = memory.plan([(4, 0, 0, 0), (4, 0, 1, 1), (4, 0, 2, 2)])
    plan.destinations[0], plan.destinations[1] = -1, 6 * HEADS * 16
    where = held(memory.allocator)[4]
    memory.move(plan)
    assert torch.equal(memory.parts, memory.expected({(4, 0, 2): (where[2], 0)}))
    plan.count.fill_(-3)
    memory.move(plan)
    assert torch.equal(memory.parts, memory.expected({(4, 0, 2): (where[2], 0)}))


def test_rows_go_on_whose_query_of_the_token_before_was_kept_and_all_others_are_let_go() -> None:
    step = step_of({3: 100, 4: 50, 5: 32, 0: 1, 7: 9, -1: 5, 400: 5}, active=6)
    kept, lengths, first, goes_on = (
        torch.tensor(of_rows, dtype=torch.int32, device=DEVICE)
        for of_rows in (
            [0, 0, 7, 99, 48, 31, 0, 8, 0],
            [1, 20, 8, 100, 50, 32, 30, 9, 0],
            [-1, 10, 3, 40, 20, 32, 30, 5, -3],
            [9] * 7,
        )
    )
    let_rows_go(step, lengths_by_row=lengths, first_lengths=first, kept_lengths=kept, goes_on=goes_on)
    torch.cuda.synchronize()
    assert goes_on.tolist() == [1, 0, 1, 0, 1, 0, 0]
    # rows 1, 2 and 4 decoded in earlier steps; row 6 has its first step now
    assert first.tolist() == [-1, -3, -3, 40, -3, 32, -1, 5, -3]
    let_rows_go(step, lengths_by_row=lengths, first_lengths=first)
    torch.cuda.synchronize()
    assert first.tolist() == [-1, -3, -3, -3, -3, -1, -1, -3, -3]


SHAPES = [  # heads, group, dim, lengths
    (1, 1, 64, [1]),
    (2, 5, 128, [33, 4000, 1, 640]),
    (2, 3, 64, [31, 32, 64, 900, 5]),
    (8, 5, 128, [8192]),
    (8, 5, 128, [700] * 40),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "group", "dim", "lengths"), SHAPES if DEVICE == "cuda" else SHAPES[:3])
def test_all_tokens_of_a_row_are_attended(
    heads: int, group: int, dim: int, lengths: list[int], dtype: torch.dtype
) -> None:
    check_attention(heads, group, dim, lengths, dtype, dtype)


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16)])
def test_all_tokens_of_a_row_in_fp8_are_attended(dim: int, dtype: torch.dtype) -> None:
    check_attention(2, 5, dim, [33, 900, 1, 640], dtype, reference.FP8)


def check_attention(
    heads: int, group: int, dim: int, lengths: list[int], dtype: torch.dtype, pool: torch.dtype
) -> None:
    random = seeded(len(lengths))
    batch, max_blocks = len(lengths), max(-(-length // BLOCK_TOKENS) for length in lengths) + 3
    pages = sum(-(-length // BLOCK_TOKENS) for length in lengths) + 7
    keys, values = (torch.randn(pages, heads, BLOCK_TOKENS, dim, generator=random).to(DEVICE, pool) for _ in range(2))
    query = torch.randn(batch + 1, heads * group, dim, generator=random).to(DEVICE, dtype)
    table = table_of(pages, max_blocks, batch + 2)
    order = torch.randperm(pages, generator=random).int()
    rows, at = torch.randperm(batch + 1, generator=random)[:batch] + 1, 0
    for row, length in zip(rows.tolist(), lengths, strict=True):
        blocks = -(-length // BLOCK_TOKENS)
        table.pages[row, :blocks] = order[at : at + blocks].to(DEVICE)
        table.held[row] = blocks
        at += blocks
    padded = torch.cat([rows, torch.zeros(1, dtype=torch.int64)]).int().to(DEVICE)
    of_step = torch.tensor([*lengths, 1], dtype=torch.int32, device=DEVICE)
    no_table = torch.zeros(batch + 1, max_blocks, dtype=torch.int32, device=DEVICE)
    step = Step(no_table, of_step, padded, torch.tensor([batch], dtype=torch.int32, device=DEVICE))
    out = torch.full_like(query, 7.0)
    workspace = AttendWorkspace(batch + 1, heads, group, dim, DEVICE, pool)
    for _ in range(2):  # a launch must leave the workspace as before
        attend_pages(query, keys, values, table, step, dim**-0.5, workspace=workspace, out=out)
    torch.cuda.synchronize()
    assert (out[batch] == 7.0).all()
    for entry, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        held_pages = table.pages[row, : -(-length // BLOCK_TOKENS)].long()
        row_keys, row_values = (
            part[held_pages].transpose(0, 1).flatten(1, 2)[:, :length].float() for part in (keys, values)
        )
        expected = reference.attend_prefill(query[entry : entry + 1].float(), row_keys, row_values, dim**-0.5)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 4e-3
        torch.testing.assert_close(out[entry : entry + 1].float(), expected, rtol=tolerance, atol=tolerance)
