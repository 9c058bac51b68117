"""The memory that all measurements read: one layer of a host pool, created like a server's and mapped like a worker's.

    keys [page][KV head][32 tokens][head_dim] │ values, likewise

The same bytes serve every dtype. They are normal bfloat16 numbers; read as float16 or, two at a time, as float32, they
are finite numbers too, none of them subnormal. Read as FP8, each byte is a finite number.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.worker.arguments import Settings, kernel_dtype, query_dtype
from cpu_worker.mapping import Mapping
from sglang_hybrid.ops.cpu.structs import Geometry
from sglang_hybrid.protocol.region import SharedRegion

BLOCK_TOKENS = 32
_PIECE = 64 << 20
_POST_BYTES = 96 << 20  # keys and values of a post: so much that writing the post takes little time beside it
_MOST_ROWS = 1 << 16  # maximum number of rows of a mailbox


class Pool:
    """The benchmark's pool, allocated and filled at construction and freed by ``close``.

    The constructor raises RegionError or OSError if the memory cannot be allocated.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._region = SharedRegion(settings.pool_bytes, name="sglang-hybrid-bench")
        self._bytes = self._region.take((self._region.size,), torch.uint8)
        self._half = self._region.size // 2
        _fill(self._bytes)
        # like a worker, use a separate read-only mapping, which has page tables of its own
        self._mapping = Mapping(self._region.fd, self._region.size, writable=False)
        self._mapping.populate(os.cpu_count() or 1, lambda: False)

    @property
    def address(self) -> int:
        return self._mapping.address

    @property
    def size(self) -> int:
        return self._mapping.size

    def huge_page_share(self) -> float | None:
        """Return the share of the read-only mapping that is in huge pages; None if the system does not report it."""
        try:
            smaps = Path("/proc/self/smaps").read_text()
        except OSError:
            return None
        of_mapping = re.search(rf"^{self.address:x}-.*?^VmFlags", smaps, re.MULTILINE | re.DOTALL)
        huge = re.search(r"^ShmemPmdMapped:\s+(\d+) kB", of_mapping[0], re.MULTILINE) if of_mapping else None
        return int(huge[1]) * 1024 / self.size if huge else None

    def pages(self, dtype: str) -> int:
        return self._half // self._settings.page_bytes(_itemsize(dtype))

    def geometry(self, dtype: str, rows: int, blocks: int) -> Geometry:
        return Geometry(
            rows=rows,
            kv_heads=self._settings.kv_heads,
            group=self._settings.group,
            head_dim=self._settings.head_dim,
            dtype=kernel_dtype(dtype),
            max_blocks=blocks,
            layers=1,
            pages=self.pages(dtype),
            keys=0,
            values=self._half,
            layer_stride=self._half,
            pool_bytes=self.size,
        )

    def tensors(self, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pool's keys and values as torch tensors ``[pages, KV heads, 32, head_dim]``."""
        shape = (self.pages(dtype), self._settings.kv_heads, BLOCK_TOKENS, self._settings.head_dim)
        size = self.pages(dtype) * self._settings.page_bytes(_itemsize(dtype))
        keys, values = (
            self._bytes[start : start + size].view(getattr(torch, dtype)).view(shape) for start in (0, self._half)
        )
        return keys, values

    def close(self) -> None:
        self._mapping.close()
        self._region.close()


@dataclass(frozen=True)
class Posts:
    """Page lists of equal posts that together attend to every block of the pool at most once, in random order."""

    rows: int
    blocks: int  # length of each list
    pages: torch.Tensor  # [posts, rows, KV heads, blocks]
    post_bytes: int  # keys and values that one post attends to
    query: torch.Tensor  # [rows, query heads, head_dim], the same for all posts

    def walk(self) -> Iterator[torch.Tensor]:
        """Yield the page lists ``[rows, KV heads, blocks]`` of one post after another, without end."""
        return itertools.cycle(self.pages)


def posts_of(pool: Pool, settings: Settings, dtype: str, blocks: int) -> Posts:
    pages, heads = pool.pages(dtype), settings.kv_heads
    row_bytes = 2 * settings.page_bytes(_itemsize(dtype)) * blocks
    rows = max(1, min(_MOST_ROWS, _POST_BYTES // row_bytes, pages // blocks))
    posts = pages // (rows * blocks)
    random = torch.Generator().manual_seed(blocks)
    # each KV head has an order of its own, since a server selects blocks of each KV head independently
    order = torch.stack([torch.randperm(pages, generator=random) for _ in range(heads)])
    lists = order[:, : posts * rows * blocks].view(heads, posts, rows, blocks).permute(1, 2, 0, 3).contiguous()
    query = torch.randn(rows, heads * settings.group, settings.head_dim, generator=random).to(
        getattr(torch, query_dtype(dtype))
    )
    return Posts(rows, blocks, lists, rows * row_bytes, query)


def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size


def _fill(memory: torch.Tensor) -> None:
    piece = torch.randn(min(_PIECE, len(memory)) // 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    # of these numbers, zero is the only one whose bits make subnormal numbers in another dtype
    piece[piece.abs() < 2.0**-20] = 1.0
    in_bytes = piece.view(torch.uint8)
    in_bytes[(in_bytes & 0x7F) == 0x7F] -= 1  # NaN in FP8
    start, size = piece.data_ptr(), 2 * len(piece)

    def copy(offset: int) -> None:
        ctypes.memmove(memory.data_ptr() + offset, start, min(size, len(memory) - offset))

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        list(threads.map(copy, range(0, len(memory), size)))
