"""Groups of rows for a prefill pass: which staged page holds which page of the pool. Host code, once per pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS


@dataclass(frozen=True)
class PrefillRows:
    """Rows of a prefill pass: their pages and lengths after the pass. New tokens of all rows follow each other.

    No row may read what another row of the batch writes: rows share only pages of their prefixes.
    """

    page_table: torch.Tensor | list[list[int]]  # [rows, blocks] in host memory; entries after a row's end are ignored
    lengths: list[int]  # tokens of each row, with the new ones
    new_tokens: list[int]

    def pages_of(self, row: int) -> torch.Tensor:
        blocks = -(-self.lengths[row] // BLOCK_TOKENS)
        pages = torch.as_tensor(self.page_table[row], dtype=torch.int64)[:blocks]
        if len(pages) < blocks:
            raise ValueError(f"row {row} has {self.lengths[row]} tokens and a page table of {len(pages)} pages")
        return pages


@dataclass(frozen=True)
class RowGroup:
    """Rows that are attended together, because the staging holds all their pages at once.

    Slots of the staging. Each kind is in the order of the pool's pages, so that neighbouring pages stay neighbours::

        0 ... only new tokens ... loaded ... some of both ... written ... only tokens of prefixes ... len(pages)
    """

    first_token: int
    last_token: int  # exclusive
    query_starts: torch.Tensor  # [rows + 1], indices of the group's tokens
    page_starts: torch.Tensor  # [rows + 1], indices of page_slots
    page_slots: torch.Tensor  # page tables of all rows, as slots of the staging
    last_page_tokens: torch.Tensor  # [rows], tokens in the last page
    places: torch.Tensor  # [tokens]: 32 * slot + token of the page, for each new token
    pages: torch.Tensor  # page of the pool, for each slot
    loaded: int  # slots from here on are loaded from the pool
    written: int  # slots before this get new tokens
    filled: torch.Tensor  # [written] tokens of each page after the pass


def group_rows(batch: PrefillRows, staging_pages: int, pool_pages: int) -> list[RowGroup]:
    """Group consecutive rows, as many together as the staging holds. Rows without new tokens are in no group.

    Raise ValueError for a row that exceeds the staging, and for pages that are not in the pool.
    """
    groups: list[RowGroup] = []
    together: list[int] = []
    pages: set[int] = set()
    first = 0
    for row, new in enumerate(batch.new_tokens):
        if not 0 <= new <= batch.lengths[row]:
            raise ValueError(f"row {row} has {batch.lengths[row]} tokens, {new} of them new")
        if new == 0:
            continue
        own = set(batch.pages_of(row).tolist())
        if len(own) > staging_pages:
            raise ValueError(
                f"row {row} has {len(own)} pages and the staging {staging_pages}: it must hold the longest context"
            )
        if min(own) < 0 or max(own) >= pool_pages:
            raise ValueError(f"row {row} has pages {min(own)} to {max(own)}, the pool has {pool_pages}")
        if together and len(pages | own) > staging_pages:
            groups.append(_group(batch, together, first))
            first, together, pages = groups[-1].last_token, [], set()
        together.append(row)
        pages |= own
    if together:
        groups.append(_group(batch, together, first))
    return groups


def _group(batch: PrefillRows, rows: list[int], first_token: int) -> RowGroup:
    tables = [batch.pages_of(row) for row in rows]
    blocks = torch.tensor([len(table) for table in tables])
    lengths = torch.tensor([batch.lengths[row] for row in rows])
    new = torch.tensor([batch.new_tokens[row] for row in rows])
    starts = blocks.cumsum(0) - blocks

    # of each entry of the rows' page tables: its first token, the row's old length, and tokens in the page
    start = (torch.arange(int(blocks.sum())) - starts.repeat_interleave(blocks)) * BLOCK_TOKENS
    old = (lengths - new).repeat_interleave(blocks)
    fill = (lengths.repeat_interleave(blocks) - start).clamp(max=BLOCK_TOKENS)

    pages, which = torch.unique(torch.cat(tables), return_inverse=True)
    loaded = torch.zeros(len(pages), dtype=torch.bool).index_put((which[start < old],), torch.tensor(True))
    written = torch.zeros_like(loaded).index_put((which[start + BLOCK_TOKENS > old],), torch.tensor(True))
    filled = torch.zeros_like(pages).scatter_reduce(0, which, fill, "amax")
    order = (2 * ~written + loaded.long()).argsort(stable=True)  # every page is loaded, written or both
    slot_of = torch.empty_like(order).scatter(0, order, torch.arange(len(order)))
    slots = slot_of[which]

    # of each new token: its position in the row, and its entry of the page table
    behind = new.cumsum(0)
    position = torch.arange(int(behind[-1])) + (lengths - behind).repeat_interleave(new)
    entry = starts.repeat_interleave(new) + position // BLOCK_TOKENS
    last_written = int(written.sum())
    return RowGroup(
        first_token=first_token,
        last_token=first_token + int(behind[-1]),
        query_starts=_starts(new),
        page_starts=_starts(blocks),
        page_slots=slots.int(),
        last_page_tokens=((lengths - 1) % BLOCK_TOKENS + 1).int(),
        places=(slots[entry] * BLOCK_TOKENS + position % BLOCK_TOKENS).int(),
        pages=pages[order].int(),
        loaded=int((written & ~loaded).sum()),
        written=last_written,
        filled=filled[order[:last_written]].int(),
    )


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
