"""Sums of values that the GPU posts to the worker: weights in the mailbox, replies, and invalid posts and replies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded
from test_cuda_mailbox import SHORT_S, Host, assert_nothing

from sglang_hybrid.ops import reference, reference_weights
from sglang_hybrid.ops.cpu.structs import VALUE_SUMS

BLOCKS = 8  # blocks of a row; more than the mailbox's lists hold


@dataclass
class WeightedLists:
    weights: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    counts: torch.Tensor


class SumHost(Host):
    def __init__(self, dtype: str = "bfloat16", kv_heads: int = 2, group: int = 3, head_dim: int = 64) -> None:
        super().__init__(dtype, kv_heads, group, head_dim, VALUE_SUMS)

    def weighted(self, seed: int, listed: int | None = None) -> WeightedLists:
        random = seeded(seed)
        shape, listed = (self.rows, self.kv_heads), listed or self.max_blocks
        weights = torch.rand(*shape, self.group, BLOCKS, BLOCK_TOKENS, generator=random)
        weights[torch.rand(weights.shape, generator=random) < 0.5] = 0
        counts = torch.randint(0, self.max_blocks + 1, shape, generator=random)
        counts[seed % self.rows] = 0
        order = torch.rand(*shape, BLOCKS, generator=random).argsort(dim=2)[..., :listed]
        pages = torch.randint(0, self.pages, (*shape, listed), generator=random)
        return WeightedLists(weights.to(DEVICE), *(part.int().to(DEVICE) for part in (order, pages, counts)))

    def post_sums(self, lists: WeightedLists, layer: int = 0, active: torch.Tensor | None = None) -> None:
        self.client.post_sums(
            lists.weights, lists.positions, lists.pages, lists.counts, layer, self.receipt,
            begins_step=True, active_rows=active,
        )  # fmt: skip

    def sums(self, lists: WeightedLists, layer: int = 0) -> torch.Tensor:
        positions, counts = lists.positions.cpu().long(), lists.counts.cpu()
        there = torch.arange(positions.shape[2]) < counts[..., None]
        inside = (positions >= 0) & (positions < BLOCKS)
        where = positions.clamp(0, BLOCKS - 1)[:, :, None, :, None]
        where = where.expand(-1, -1, self.group, -1, BLOCK_TOKENS)
        weights = lists.weights.cpu().gather(3, where) * (there & inside)[:, :, None, :, None]
        ids = lists.pages.cpu().long().masked_fill(~there, reference.NO_BLOCK)
        return reference_weights.sum_values(weights, self.pool[1, layer], ids)


@pytest.fixture
def host() -> Iterator[SumHost]:
    made = SumHost()
    yield made
    made.client.attach(None)
    made.mailbox.region.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 3, 64), (8, 5, 128), (1, 1, 64), (1, 16, 128)])
def test_the_worker_sums_values_by_posted_weights(dtype: str, kv_heads: int, group: int, head_dim: int) -> None:
    host = SumHost(dtype, kv_heads, group, head_dim)
    with host.engine():
        for seed in range(4):
            lists, layer = host.weighted(seed), seed % host.layers
            host.post_sums(lists, layer)
            results = host.wait()
            assert results.served.tolist() == [1] * host.rows, host.client.outcomes()
            empty = (lists.counts == 0).repeat_interleave(group, dim=1)
            assert torch.equal(results.lse == -torch.inf, empty) and not results.lse[~empty].any()
            torch.testing.assert_close(results.out.cpu(), host.sums(lists, layer), rtol=2e-2, atol=2e-2)
    host.client.attach(None)


def test_sums_and_attention_take_turns_in_one_mailbox(host: SumHost) -> None:
    with host.engine():
        for seed in range(3):
            attended, summed = host.lists(seed), host.weighted(seed)
            host.post(attended)
            expected = host.expected(attended)
            assert torch.equal(host.wait().out.cpu(), expected.out)
            host.post_sums(summed)
            torch.testing.assert_close(host.wait().out.cpu(), host.sums(summed), rtol=2e-2, atol=2e-2)


def test_values_without_a_weight_may_be_anything(host: SumHost) -> None:
    lists = host.weighted(1)
    lists.weights[..., 7] = 0
    host.pool[1, :, :, :, 7] = torch.nan
    with host.engine():
        host.post_sums(lists)
        results = host.wait()
    torch.testing.assert_close(results.out.cpu(), host.sums(lists), rtol=2e-2, atol=2e-2)


def test_a_list_that_is_longer_than_the_mailbox_holds_is_refused_and_others_are_served(host: SumHost) -> None:
    lists = host.weighted(1, listed=BLOCKS)
    lists.counts[0], lists.counts[4, 1] = host.max_blocks, host.max_blocks + 1
    with host.engine():
        host.post_sums(lists)
        results = host.wait()
    assert results.served.tolist() == [row != 4 for row in range(host.rows)]
    expected = host.sums(lists)
    expected[4] = 0
    torch.testing.assert_close(results.out.cpu(), expected, rtol=2e-2, atol=2e-2)
    assert host.client.outcomes()["refused"] == 1


@pytest.mark.parametrize("count", [-1, BLOCKS + 1, 1 << 30])
def test_a_count_that_no_list_can_have_is_refused(host: SumHost, count: int) -> None:
    lists = host.weighted(1, listed=BLOCKS)
    lists.counts[2, 0] = count
    with host.engine():
        host.post_sums(lists)
        results = host.wait()
    assert results.served.tolist() == [row != 2 for row in range(host.rows)]


def test_a_page_that_is_not_in_the_pool_is_refused(host: SumHost) -> None:
    lists = host.weighted(1)
    lists.counts[3], lists.pages[3, 1, 0] = 1, host.pages
    with host.engine():
        host.post_sums(lists)
        results = host.wait()
    assert results.served.tolist() == [row != 3 for row in range(host.rows)]
    assert_nothing(results, slice(3, 4))


def test_a_position_that_is_no_block_has_weights_of_zero(host: SumHost) -> None:
    lists = host.weighted(1)
    lists.counts.fill_(3)
    lists.positions[0, 0, 1], lists.positions[5, 1, 2] = BLOCKS, -1
    with host.engine():
        host.post_sums(lists)
        results = host.wait()
    torch.testing.assert_close(results.out.cpu(), host.sums(lists), rtol=2e-2, atol=2e-2)


def test_nothing_is_written_beyond_the_lists_of_a_post(host: SumHost) -> None:
    """In the mailbox, weights of other rows and beyond the end of a list are not written."""
    at, g = host.mailbox.layout.weights, host.geometry
    numbers = 2 * g.rows * g.kv_heads * g.group * g.max_blocks * BLOCK_TOKENS
    memory = (ctypes.c_float * numbers).from_address(host.mailbox.region.address + at)
    mailbox = torch.frombuffer(memory, dtype=torch.float32).view(
        2, g.rows, g.kv_heads, g.group, g.max_blocks, BLOCK_TOKENS
    )
    mailbox.fill_(55.0)
    lists = host.weighted(1)
    host.post_sums(lists, active=torch.tensor([4], dtype=torch.int32, device=DEVICE))
    torch.cuda.synchronize()
    there = torch.arange(g.max_blocks) < lists.counts.cpu()[..., None]
    there[4:] = False
    assert (mailbox[0] == 55.0).all()  # the first post is in slot 1
    written = there[:, :, None].expand(-1, -1, g.group, -1)
    assert (mailbox[1][~written] == 55.0).all() and (mailbox[1][written] != 55.0).all()


def test_replies_of_another_step_or_of_the_future_are_dropped(host: SumHost) -> None:
    lists = host.weighted(2)
    lists.counts.fill_(1)
    host.post_sums(lists)
    torch.cuda.synchronize()
    state = host.client.read_state()
    for row in range(host.rows):
        host.write_reply(state.sequence, row, state.sequence, state.generation)
    host.write_reply(state.sequence, 0, state.sequence, state.generation + 1)
    host.write_reply(state.sequence, 1, state.sequence + 2, state.generation)
    host.write_reply(state.sequence, 2, state.sequence, state.generation, status=2)
    host.write_reply(state.sequence, 3, state.sequence, state.generation, status=99)
    results = host.wait(SHORT_S)
    assert results.served.tolist() == [0, 0, 0, 0, 1, 1]
    assert_nothing(results, slice(0, 4))


def test_weights_are_refused_by_a_mailbox_that_has_no_room_for_them() -> None:
    host, lists = Host(), SumHost().weighted(1)
    with pytest.raises(ValueError, match=r"has to declare Needs\(value_sums=True\)"):
        SumHost.post_sums(host, lists)  # type: ignore[arg-type]
    assert host.mailbox.bell == 0
    host.client.attach(None)
