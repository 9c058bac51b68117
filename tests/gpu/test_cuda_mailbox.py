"""Mailbox client on the GPU, with a real worker engine in this process."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cpu.dtypes import code_of
from sglang_hybrid.ops.cpu.library import checked, library, mailbox_fields
from sglang_hybrid.ops.cpu.lists import HostLists
from sglang_hybrid.ops.cpu.local import LocalAttention
from sglang_hybrid.ops.cpu.structs import MASKS, EngineOptions, Geometry
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient, MailboxCounts
from sglang_hybrid.ops.cuda.structs import OUTCOMES, WAIT_BOUNDS
from sglang_hybrid.protocol.mailbox import Mailbox
from sglang_hybrid.protocol.region import SharedRegion

TASK_BLOCKS = 2
SLOTS = 2  # mailbox_slots of mailbox.h
SCALE = 0.125
UNTOUCHED = 77.0
PATIENCE_S, SHORT_S = 20.0, 0.002
SPIN_US = 5_000_000  # the worker stays awake: these tests check posts, not parking
WORDS = {4: ctypes.c_uint32, 8: ctypes.c_uint64}
TORCH_DTYPES = {  # dtypes of the pool and of queries
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float32": (torch.float32, torch.float32),
    "fp8 for bfloat16": (reference.FP8, torch.bfloat16),
}


@dataclass(frozen=True)
class Lists:
    """One layer's misses, in the layout that kernels take."""

    query: torch.Tensor
    pages: torch.Tensor
    counts: torch.Tensor
    last_fill: torch.Tensor

    def copy_(self, other: Lists) -> None:
        for name in ("query", "pages", "counts", "last_fill"):
            getattr(self, name).copy_(getattr(other, name))

    def as_reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lists as the reference takes them: ids and fill ``[B, H, N]``."""
        pages, counts, last_fill = self.pages.cpu(), self.counts.cpu()[..., None], self.last_fill.cpu()[..., None]
        place = torch.arange(pages.shape[2])
        fill = torch.where(place == counts - 1, last_fill, BLOCK_TOKENS).masked_fill(place >= counts, 0)
        return pages.masked_fill(place >= counts, reference.NO_BLOCK).long(), fill.long()


class Results:
    def __init__(self, rows: int, heads: int, dim: int) -> None:
        self.out = torch.full((rows, heads, dim), UNTOUCHED, device=DEVICE)
        self.lse = torch.full((rows, heads), UNTOUCHED, device=DEVICE)
        self.served = torch.full((rows,), 7, dtype=torch.int32, device=DEVICE)


class Host:
    """A pool of two layers, a mailbox with its GPU client, and local attention that computes expected results."""

    rows, max_blocks, layers, pages = 6, 5, 2, 12

    def __init__(
        self, dtype: str = "bfloat16", kv_heads: int = 2, group: int = 3, head_dim: int = 64, flags: int = 0
    ) -> None:
        pool_dtype, self.dtype = TORCH_DTYPES[dtype]
        self.kv_heads, self.group, self.head_dim = kv_heads, group, head_dim
        shape = (2, self.layers, self.pages, kv_heads, BLOCK_TOKENS, head_dim)
        size = math.prod(shape) * pool_dtype.itemsize
        self.memory = SharedRegion(SharedRegion.size_for(size))
        self.pool = self.memory.take(shape, pool_dtype)  # [key or value][layer][page]...
        self.pool.copy_(torch.randn(shape, generator=seeded(7)))
        layer = self.pool[0, 0].numel() * pool_dtype.itemsize
        self.geometry = Geometry(
            self.rows, kv_heads, group, head_dim, code_of(pool_dtype, self.dtype), self.max_blocks, self.layers,
            self.pages, 0, self.layers * layer, layer, 2 * self.layers * layer, flags,
        )  # fmt: skip
        self.local = LocalAttention(self.pool.data_ptr(), self.geometry, TASK_BLOCKS, threads=2)
        self.mailbox = Mailbox(self.geometry)
        self.client = DeviceMailboxClient(self.geometry, DEVICE)
        self.client.attach(self.mailbox)
        self.receipt = self.client.new_receipt(self.rows)
        self.results = self.new_results()

    def new_results(self) -> Results:
        return Results(self.rows, self.kv_heads * self.group, self.head_dim)

    def lists(self, seed: int, shortest: int = 0) -> Lists:
        random = seeded(seed)
        shape = (self.rows, self.kv_heads)
        query = torch.randn(self.rows, self.kv_heads * self.group, self.head_dim, generator=random)
        counts = torch.randint(shortest, self.max_blocks + 1, shape, generator=random)
        if shortest == 0:
            counts[seed % self.rows] = 0  # a row without blocks
        return Lists(
            query.to(DEVICE, self.dtype),
            torch.randint(0, self.pages, (*shape, self.max_blocks), generator=random).int().to(DEVICE),
            counts.int().to(DEVICE),
            torch.randint(1, BLOCK_TOKENS + 1, shape, generator=random).int().to(DEVICE),
        )

    @contextlib.contextmanager
    def engine(self, mailbox: Mailbox | None = None) -> Iterator[None]:
        options = EngineOptions(2, 1, TASK_BLOCKS, SPIN_US, None, None)
        engine = checked(
            library().sh_engine_start, (mailbox or self.mailbox).region.address, self.pool.data_ptr(),
            ctypes.byref(self.geometry), ctypes.byref(options),
        )  # fmt: skip
        try:
            yield
        finally:
            torch.cuda.synchronize()
            library().sh_engine_stop(engine)

    def post(self, lists: Lists, layer: int = 0, begins_step: bool = True, **options: Any) -> None:
        receipt = options.pop("receipt", self.receipt)
        self.client.post(
            lists.query, lists.pages, lists.counts, lists.last_fill, layer, SCALE, receipt,
            begins_step=begins_step, **options,
        )  # fmt: skip

    def wait(self, deadline_s: float = PATIENCE_S, results: Results | None = None, receipt: Any = None) -> Results:
        into = results or self.results
        self.client.wait(self.receipt if receipt is None else receipt, deadline_s, into.out, into.lse, into.served)
        return into

    def expected(self, lists: Lists, layer: int = 0, masks: torch.Tensor | None = None) -> HostLists:
        ids, fill = lists.as_reference()
        computed = HostLists(lists.query, ids, fill, layer, SCALE, self.dtype, masks)
        self.local.attend(computed)
        return computed

    def word(self, array: str, record: str, name: str, index: int = 0) -> Any:
        """Return a field of a record in the mailbox, as a ctypes integer that can be read and written."""
        offset, size = mailbox_fields()[record][name]
        _, stride = mailbox_fields()[record][""]
        place = self.mailbox.region.address + getattr(self.mailbox.layout, array) + index * stride + offset
        return WORDS[size].from_address(place)

    def write_reply(self, sequence: int, row: int, claimed: int, generation: int, status: int = 0) -> None:
        """Write a reply to the slot of ``sequence`` that claims to answer post ``claimed``."""
        for name, value in (("generation", generation), ("status", status), ("sequence", claimed)):
            self.word("replies", "Reply", name, sequence % SLOTS * self.rows + row).value = value


def assert_same_bits(results: Results, expected: HostLists, rows: slice = slice(None)) -> None:
    """Assert that the worker's results have the same bits as what this process computes with the same kernels."""
    assert torch.equal(results.lse[rows].cpu(), expected.lse[rows])
    assert torch.equal(results.out[rows].cpu(), expected.out[rows])


def assert_nothing(results: Results, rows: slice = slice(None)) -> None:
    assert (results.lse[rows] == -torch.inf).all()
    assert not results.out[rows].any()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.client.attach(None)
    made.mailbox.region.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "fp8 for bfloat16"])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 3, 64), (8, 5, 128), (1, 1, 96)])
def test_a_layer_is_computed_by_the_worker(dtype: str, kv_heads: int, group: int, head_dim: int) -> None:
    host = Host(dtype, kv_heads, group, head_dim)
    with host.engine():
        for seed in range(5):
            lists, layer = host.lists(seed), seed % host.layers
            host.post(lists, layer)
            results = host.wait()
            assert results.served.tolist() == [1] * host.rows
            assert_same_bits(results, host.expected(lists, layer))
            ids, fill = lists.as_reference()
            keys, values = host.pool[:, layer]
            out, lse = reference.attend_blocks(lists.query.cpu(), keys, values, ids, fill, SCALE)
            torch.testing.assert_close(results.lse.cpu(), lse, atol=1e-2, rtol=1e-2)
            torch.testing.assert_close(results.out.cpu(), out, atol=1e-2, rtol=1e-2)
    outcomes = host.client.outcomes()
    assert outcomes["served"] + outcomes["empty"] == 5 * host.rows
    assert outcomes["empty"] >= 5
    host.client.attach(None)


def test_the_worker_attends_to_tokens_whose_bit_is_set() -> None:
    host = Host(flags=MASKS)
    random = seeded(1)
    with host.engine():
        for seed in range(5):
            lists = host.lists(seed)
            masks = torch.randint(-(2**31), 2**31, lists.pages.shape, generator=random)
            masks[torch.rand(masks.shape, generator=random) < 0.3] = 0
            masks = masks.int().to(DEVICE)
            host.post(lists, masks=masks)
            results = host.wait()
            assert results.served.tolist() == [1] * host.rows
            assert_same_bits(results, host.expected(lists, masks=masks))
            host.post(lists)  # without masks all tokens are attended, though the mailbox still holds masks
            assert_same_bits(host.wait(), host.expected(lists))
    host.client.attach(None)


def test_masks_are_refused_by_a_mailbox_that_has_no_room_for_them(host: Host) -> None:
    lists = host.lists(1)
    with pytest.raises(ValueError, match=r"has to declare Needs\(masks=True\)"):
        host.post(lists, masks=torch.ones_like(lists.pages))
    assert host.mailbox.bell == 0


def test_a_replayed_graph_posts_new_layers_one_ahead(host: Host) -> None:
    """As in a decode step, layer i + 1 is posted on another stream before the wait for layer i."""
    layers, replays = 4, 200
    lists = [host.lists(seed) for seed in range(layers)]
    receipts = [host.client.new_receipt(host.rows) for _ in range(2)]
    results = [host.new_results() for _ in range(layers)]
    active = torch.tensor([host.rows], dtype=torch.int32, device=DEVICE)
    side = torch.cuda.Stream()

    def step() -> None:
        main = torch.cuda.current_stream()
        posted: dict[int, torch.cuda.Event] = {}
        waited: dict[int, torch.cuda.Event] = {}

        def post(layer: int) -> None:
            if layer >= 2:
                side.wait_event(waited[layer - 2])  # frees the receipt and the mailbox slot
            with torch.cuda.stream(side):
                host.post(
                    lists[layer], layer % host.layers, begins_step=layer == 0, receipt=receipts[layer % 2],
                    active_rows=active,
                )  # fmt: skip
            posted[layer] = side.record_event()

        side.wait_stream(main)
        post(0)
        for layer in range(layers):
            if layer + 1 < layers:
                post(layer + 1)
            main.wait_event(posted[layer])
            host.wait(PATIENCE_S, results[layer], receipts[layer % 2])
            waited[layer] = main.record_event()
        main.wait_stream(side)

    with host.engine():
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        first = host.client.read_state()
        for replay in range(replays):
            active.fill_(1 + replay % host.rows)
            for layer in range(layers):
                lists[layer].copy_(host.lists(replay * layers + layer))
            for result in results:
                result.out.fill_(UNTOUCHED)
            host.mailbox.wake()
            graph.replay()
            rows = slice(0, int(active))
            for layer in range(layers):
                assert results[layer].served[rows].all(), (replay, layer, host.client.outcomes())
                assert_same_bits(results[layer], host.expected(lists[layer], layer % host.layers), rows)
                assert (results[layer].out[int(active) :] == UNTOUCHED).all()
    last = host.client.read_state()
    assert last.sequence - first.sequence == replays * layers
    assert last.generation - first.generation == replays
    assert host.mailbox.bell == last.sequence
    outcomes = host.client.outcomes()
    assert outcomes["served"] > 0 and not any(outcomes[kind] for kind in ("late", "damaged", "refused", "withheld"))


def test_nothing_is_posted_for_a_batch_without_rows(host: Host) -> None:
    host.post(host.lists(1), active_rows=torch.zeros(1, dtype=torch.int32, device=DEVICE))
    results = host.wait(SHORT_S)
    assert host.mailbox.bell == 0
    assert (results.out == UNTOUCHED).all() and (results.served == 7).all()


def test_rows_without_blocks_need_no_worker(host: Host) -> None:
    lists = host.lists(1)
    lists.counts.zero_()
    host.post(lists)
    results = host.wait()
    assert results.served.tolist() == [1] * host.rows
    assert_nothing(results)


def test_a_stopped_worker_costs_one_deadline_and_serves_again(host: Host) -> None:
    lists = host.lists(3, shortest=1)
    for _ in range(6):
        host.post(lists)
        results = host.wait(SHORT_S)
        assert results.served.tolist() == [0] * host.rows
        assert_nothing(results)
    outcomes = host.client.outcomes()
    assert outcomes["late"] == 2 * host.rows  # the second was posted before the first was known to be late
    assert outcomes["withheld"] == 4 * host.rows
    assert host.mailbox.bell == 2

    with host.engine():
        served = 0
        for _ in range(10_000):  # the worker catches up in its own time
            host.post(lists)
            served = int(host.wait().served.sum())
            if served:
                break
        assert served == host.rows
        assert_same_bits(host.results, host.expected(lists))
        for seed in range(5):
            again = host.lists(seed)
            host.post(again)
            assert host.wait().served.all()
            assert_same_bits(host.results, host.expected(again))


def test_a_worker_that_the_host_gave_up_is_not_waited_for(host: Host) -> None:
    """Otherwise a killed worker costs a whole deadline, half a second, however soon the host knows."""
    host.post(host.lists(3, shortest=1))
    host.mailbox.give_up()
    begin = time.monotonic()
    results = host.wait(60)
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 30
    assert results.served.tolist() == [0] * host.rows
    assert host.client.outcomes()["late"] == host.rows


def test_rows_out_of_bounds_are_refused_and_harm_no_other(host: Host) -> None:
    lists = host.lists(3, shortest=1)
    lists.pages[1, 0, 0] = host.pages
    lists.counts[2, 1] = host.max_blocks + 1
    lists.counts[3, 0] = -1
    lists.last_fill[4, 1] = BLOCK_TOKENS + 1
    with host.engine():
        host.post(lists)
        results = host.wait()
    assert results.served.tolist() == [1, 0, 0, 0, 0, 1]
    assert_nothing(results, slice(1, 5))
    assert host.client.outcomes()["refused"] == 4
    lists.pages[1, 0, 0], lists.counts[2, 1], lists.counts[3, 0], lists.last_fill[4, 1] = 0, 1, 1, 1
    expected = host.expected(lists)
    for row in (0, 5):
        assert_same_bits(results, expected, slice(row, row + 1))


def test_only_a_reply_to_this_post_counts(host: Host) -> None:
    lists = host.lists(3, shortest=1)
    host.post(lists)
    torch.cuda.synchronize()
    generation = host.client.read_state().generation
    host.write_reply(1, 0, claimed=3, generation=generation)  # reply to a later post
    host.write_reply(1, 1, claimed=1, generation=generation + 1)  # reply of another decode step
    host.write_reply(1, 2, claimed=1, generation=generation, status=2)
    host.write_reply(1, 3, claimed=1, generation=generation)
    results = host.wait(SHORT_S)
    assert results.served.tolist() == [0, 0, 0, 1, 0, 0]
    assert_nothing(results, slice(0, 3))
    assert host.client.outcomes() == {"served": 1, "empty": 0, "late": 2, "damaged": 2, "refused": 1, "withheld": 0}


def test_a_reply_that_is_there_before_its_post_is_cleared(host: Host) -> None:
    generation = host.client.read_state().generation + 1
    for row in range(host.rows):
        host.write_reply(1, row, claimed=1, generation=generation)
    host.post(host.lists(3, shortest=1))
    results = host.wait(SHORT_S)
    assert not results.served.any()
    assert host.client.outcomes()["late"] == host.rows


def test_a_graph_goes_on_with_the_mailbox_of_the_next_worker(host: Host) -> None:
    lists = host.lists(3, shortest=1)
    host.post(lists)  # loads the kernels
    host.wait(SHORT_S)
    host.client.attach(host.mailbox)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        host.post(lists)
        host.wait()
    with host.engine():
        graph.replay()
        assert host.results.served.all()
    host.client.attach(None)
    graph.replay()
    assert not host.results.served.any()
    assert host.client.outcomes()["withheld"] == host.rows
    other = Mailbox(host.geometry)
    host.client.attach(other)
    with host.engine(other):
        graph.replay()
        assert host.results.served.all()
        assert_same_bits(host.results, host.expected(lists))
    assert other.bell == 1


# -- counts ----------------------------------------------------------------------------------


def counts_of(host: Host) -> MailboxCounts:
    return MailboxCounts.of(host.client.counts.cpu().tolist())


def test_blocks_are_counted_by_what_became_of_their_rows(host: Host) -> None:
    lists = host.lists(1)
    blocks = int(lists.counts.sum())
    with host.engine():
        host.post(lists)
        host.wait()
    host.client.attach(None)
    host.post(lists)
    host.wait(SHORT_S)
    counted = counts_of(host)
    assert counted.rows == host.client.outcomes()
    assert counted.blocks == dict.fromkeys(OUTCOMES, 0) | {"served": blocks, "withheld": blocks}


def test_a_step_waits_for_the_sum_of_its_layers_and_is_counted_by_the_next(host: Host) -> None:
    lists, nobody = host.lists(1), [0] * (len(WAIT_BOUNDS) + 1)
    for step in range(3):  # there is no worker: the first layer waits until its deadline, all others do not wait
        host.post(lists, 0, begins_step=True)
        host.wait(SHORT_S)
        host.post(lists, 1, begins_step=False)
        host.wait(SHORT_S)
        counted = counts_of(host)
        assert sum(counted.waits) == min(step, 1)  # from the second step on the worker is behind and gets no posts
    assert counted.waited_s >= SHORT_S
    bucket = next((number for number, bound in enumerate(WAIT_BOUNDS) if counted.waited_s <= bound), len(WAIT_BOUNDS))
    nobody[bucket] = 1
    assert list(counted.waits) == nobody


def test_a_step_that_asks_for_nothing_does_not_wait(host: Host) -> None:
    lists = host.lists(1)
    lists.counts.zero_()
    for _ in range(2):
        host.post(lists)
        host.wait(SHORT_S)
    assert not any(counts_of(host).waits) and counts_of(host).waited_s == 0
