"""Groups of rows that a prefill pass stages together, and their places in the staging: host arithmetic, no GPU."""

from __future__ import annotations

import pytest
import torch

from sglang_hybrid.engines.cuda.row_groups import PrefillRows, RowGroup, group_rows
from sglang_hybrid.engines.cuda.staging import runs_of, suits_engine

BLOCK_TOKENS = 32


def tokens_of(group: RowGroup, row: int) -> list[tuple[int, int]]:
    """Return (page, token in the page) of every token of a row, in the order in which attention reads them."""
    first, last = group.page_starts[row : row + 2].tolist()
    slots = group.page_slots[first:last].tolist()
    length = BLOCK_TOKENS * (len(slots) - 1) + int(group.last_page_tokens[row])
    return [(int(group.pages[slots[p // BLOCK_TOKENS]]), p % BLOCK_TOKENS) for p in range(length)]


def placed(group: RowGroup) -> list[tuple[int, int]]:
    return [(int(group.pages[place // BLOCK_TOKENS]), place % BLOCK_TOKENS) for place in group.places.tolist()]


def expected_tokens(pages: list[int], first: int, last: int) -> list[tuple[int, int]]:
    return [(pages[p // BLOCK_TOKENS], p % BLOCK_TOKENS) for p in range(first, last)]


def random_batch(seed: int, pool_pages: int) -> PrefillRows:
    random = torch.Generator().manual_seed(seed)
    free = torch.randperm(pool_pages, generator=random).tolist()
    shared, free = free[:3], free[3:]
    tables, lengths, new_tokens = [], [], []
    for _ in range(int(torch.randint(1, 9, (), generator=random))):
        prefix = shared[: int(torch.randint(0, 4, (), generator=random))]
        own = int(torch.randint(0, 150, (), generator=random))
        length = BLOCK_TOKENS * len(prefix) + own
        blocks = -(-own // BLOCK_TOKENS)
        tables.append([*prefix, *free[:blocks], 10**9])  # entries behind the end must not matter
        free = free[blocks:]
        lengths.append(length)
        new_tokens.append(int(torch.randint(0, own + 1, (), generator=random)))
    return PrefillRows(tables, lengths, new_tokens)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_finds_its_tokens(seed: int) -> None:
    batch = random_batch(seed, 80)
    assert isinstance(batch.page_table, list)
    staging_pages = 8 + seed % 5 * 4
    groups = group_rows(batch, staging_pages, 80)
    rows = [row for row, new in enumerate(batch.new_tokens) if new]
    token = 0
    for group in groups:
        own, rows = rows[: len(group.last_page_tokens)], rows[len(group.last_page_tokens) :]
        new = [batch.new_tokens[row] for row in own]
        assert group.first_token == token and group.query_starts.tolist() == [sum(new[:n]) for n in range(len(new) + 1)]
        token += sum(new)
        assert group.last_token == token
        assert len(group.pages) <= staging_pages and len(group.pages.unique()) == len(group.pages)

        places, loaded = [], set()
        written: dict[int, int] = {}
        for index, row in enumerate(own):
            pages, length, old = batch.page_table[row], batch.lengths[row], batch.lengths[row] - batch.new_tokens[row]
            assert tokens_of(group, index) == expected_tokens(pages, 0, length)
            places += expected_tokens(pages, old, length)
            loaded |= {page for page, _ in expected_tokens(pages, 0, old)}
            for page, in_page in expected_tokens(pages, old, length):
                written[page] = max(written.get(page, 0), in_page + 1)
        assert placed(group) == places
        assert set(group.pages[group.loaded :].tolist()) == loaded
        assert dict(zip(group.pages[: group.written].tolist(), group.filled.tolist(), strict=True)) == written
    assert not rows and token == sum(batch.new_tokens)


def test_a_group_takes_as_many_rows_as_fit() -> None:
    batch = PrefillRows([[1, 2], [1, 3], [4, 5], [6, 7]], [64, 64, 64, 64], [1, 1, 1, 1])
    assert [len(group.last_page_tokens) for group in group_rows(batch, 3, 10)] == [2, 1, 1]
    assert [len(group.last_page_tokens) for group in group_rows(batch, 5, 10)] == [3, 1]
    assert [len(group.last_page_tokens) for group in group_rows(batch, 7, 10)] == [4]


def test_slots_are_in_the_order_of_pages_within_their_kind() -> None:
    # pages 9 and 3 are only read; 12 and 5 get new tokens behind old ones; 8, 7 and 6 get new tokens only
    batch = PrefillRows([[9, 12, 8, 7], [3, 5, 6, 0]], [128, 96], [64 + 10, 32 + 1])
    (group,) = group_rows(batch, 10, 13)
    assert group.pages.tolist() == [6, 7, 8, 5, 12, 3, 9]
    assert (group.loaded, group.written) == (3, 5)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (PrefillRows([[1, 2, 3]], [96], [1]), "row 0 has 3 pages and the staging 2"),
        (PrefillRows([[1, 20]], [64], [1]), "row 0 has pages 1 to 20, the pool has 20"),
        (PrefillRows([[-1, 2]], [64], [1]), "row 0 has pages -1 to 2"),
        (PrefillRows([[1]], [33], [1]), "row 0 has 33 tokens and a page table of 1 pages"),
        (PrefillRows([[1], [2]], [5, 5], [1, 6]), "row 1 has 5 tokens, 6 of them new"),
    ],
)
def test_what_cannot_be_staged_says_why(batch: PrefillRows, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        group_rows(batch, 2, 20)


def test_rows_without_new_tokens_are_in_no_group() -> None:
    assert group_rows(PrefillRows([[1, 2]], [64], [0]), 1, 10) == []
    assert group_rows(PrefillRows([], [], []), 1, 10) == []


def test_runs() -> None:
    pages = torch.tensor([4, 5, 6, 9, 2, 3], dtype=torch.int32)
    assert runs_of(pages, 10).tolist() == [[4, 10, 3], [9, 13, 1], [2, 14, 2]]
    assert runs_of(pages[:1], 0).tolist() == [[4, 0, 1]]
    assert runs_of(pages[:0], 0).shape == (0, 3)


def test_short_runs_are_copied_by_kernels() -> None:
    assert suits_engine(pages=256, runs=3, page_bytes=64 << 10)
    assert suits_engine(pages=256, runs=128, page_bytes=64 << 10)
    assert not suits_engine(pages=256, runs=200, page_bytes=64 << 10)
    assert not suits_engine(pages=256, runs=128, page_bytes=16 << 10)
