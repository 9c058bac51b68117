"""A host pool with both sides of a mailbox in this process, for tests that need no worker process."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from attention_oracle import seeded
from worker_process import BLOCK_TOKENS, PATIENCE_S, POOL_DTYPES, QUERY_DTYPES

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cpu.dtypes import code_of
from sglang_hybrid.ops.cpu.library import checked, library
from sglang_hybrid.ops.cpu.lists import HostLists, HostSums, HostWork
from sglang_hybrid.ops.cpu.local import LocalAttention
from sglang_hybrid.ops.cpu.structs import EngineOptions, Geometry
from sglang_hybrid.protocol.mailbox import Mailbox

SCALE = 0.125


@dataclass(frozen=True)
class Lists:
    query: torch.Tensor
    ids: torch.Tensor
    fill: torch.Tensor
    masks: torch.Tensor | None = None


class Host:
    """A host pool of two layers with random keys and values, and attention over it in this process."""

    rows, max_blocks, layers, pages = 4, 5, 2, 12  # defaults, which ``otherwise`` replaces
    task_blocks = 2
    flags = 0

    def __init__(
        self, dtype: str = "float32", kv_heads: int = 2, group: int = 3, head_dim: int = 64, **otherwise: int
    ) -> None:
        vars(self).update(otherwise)
        self.dtype, self.kv_heads, self.group, self.head_dim = dtype, kv_heads, group, head_dim
        kind = POOL_DTYPES[dtype]
        shape = (2, self.layers, self.pages, kv_heads, BLOCK_TOKENS, head_dim)
        self.pool = torch.randn(shape, generator=seeded(7)).to(kind)  # [key or value][layer][page]...
        layer = self.pool[0, 0].numel() * kind.itemsize
        self.geometry = Geometry(
            self.rows, kv_heads, group, head_dim, code_of(kind, QUERY_DTYPES[dtype]), self.max_blocks, self.layers,
            self.pages, 0, self.layers * layer, layer, 2 * self.layers * layer, self.flags,
        )  # fmt: skip
        self.local = LocalAttention(self.pool.data_ptr(), self.geometry, self.task_blocks, threads=2)

    def random_lists(self, rows: int, listed: int, seed: int) -> Lists:
        """Return random queries and block lists of 0 to ``listed`` blocks, with a random fill of the last block."""
        random = seeded(seed)
        query = torch.randn(rows, self.kv_heads * self.group, self.head_dim, generator=random)
        counts = torch.randint(0, listed + 1, (rows, self.kv_heads, 1), generator=random)
        last_fill = torch.randint(1, BLOCK_TOKENS + 1, counts.shape, generator=random)
        ids = torch.randint(0, self.pages, (rows, self.kv_heads, listed), generator=random)
        position = torch.arange(listed)
        fill = torch.where(position == counts - 1, last_fill, BLOCK_TOKENS)
        beyond = position >= counts
        kind = QUERY_DTYPES[self.dtype]
        return Lists(query.to(kind), ids.masked_fill(beyond, reference.NO_BLOCK), fill.masked_fill(beyond, 0))

    def masked_lists(self, rows: int, listed: int, seed: int) -> Lists:
        """Return ``random_lists`` with masks of tokens: all set, none set, or random bits."""
        lists, random = self.random_lists(rows, listed, seed), seeded(seed + 1)
        masks = torch.randint(-(2**31), 2**31, lists.ids.shape, generator=random)
        kind = torch.randint(0, 4, lists.ids.shape, generator=random)
        masks = torch.where(kind == 0, 0, torch.where(kind == 1, -1, masks))
        return replace(lists, masks=masks.to(torch.int32))

    def full_lists(self, rows: int = 2, seed: int = 1) -> Lists:
        """Return lists of two full blocks each, so that no row is empty."""
        shape = (rows, self.kv_heads, 2)
        some = self.random_lists(rows, 2, seed)
        return Lists(some.query, torch.arange(2).expand(shape), torch.full(shape, BLOCK_TOKENS))

    def on_host(self, lists: Lists, layer: int = 0) -> HostLists:
        return HostLists(lists.query, lists.ids, lists.fill, layer, SCALE, self.local.query_dtype, lists.masks)

    def computed_here(self, lists: Lists, layer: int = 0) -> HostLists:
        computed = self.on_host(lists, layer)
        self.local.attend(computed)
        return computed

    def random_weights(self, lists: Lists, seed: int) -> torch.Tensor:
        """Return random weights ``[rows, KV heads, group, listed, 32]``, 0 behind a list's last token.

        About 30 % of the tokens have weight 0 for all query heads, and 30 % of all weights are 0 for single heads.
        """
        random, block = seeded(seed), (*lists.ids.shape, BLOCK_TOKENS)
        weights = torch.rand(self.group, *block, generator=random)
        weights[torch.rand(weights.shape, generator=random) < 0.3] = 0.0
        asked = (torch.rand(block, generator=random) < 0.7) & (torch.arange(BLOCK_TOKENS) < lists.fill[..., None])
        return torch.where(asked, weights, 0.0).movedim(0, 2).contiguous()

    def sums(self, weights: torch.Tensor, lists: Lists, layer: int = 0) -> HostSums:
        return HostSums(weights, lists.ids, layer, self.head_dim)

    def sums_computed_here(self, weights: torch.Tensor, lists: Lists, layer: int = 0) -> HostSums:
        computed = self.sums(weights, lists, layer)
        self.local.attend(computed)
        return computed

    @contextlib.contextmanager
    def engine(self, mailbox: Mailbox, threads: int = 2, spin_us: int = 50) -> Iterator[int]:
        options = EngineOptions(threads, 1, self.task_blocks, spin_us, None, None)
        engine = checked(
            library().sh_engine_start, mailbox.region.address, self.pool.data_ptr(), ctypes.byref(self.geometry),
            ctypes.byref(options),
        )  # fmt: skip
        try:
            yield engine
        finally:
            library().sh_engine_stop(engine)


def collected(mailbox: Mailbox, lists: HostWork, sequence: int, timeout_s: float = PATIENCE_S) -> int:
    return mailbox.collect(sequence, lists, timeout_s, ctypes.c_uint32())


def assert_same_bits(left: HostWork, right: HostWork) -> None:
    for one, other in ((left.out, right.out), (left.lse, right.lse)):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
