"""A decode instance receives pages from a prefill instance and admits them, before the first decode step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from sglang.srt.disaggregation.base import KVPoll

from sglang_hybrid.integration import arrivals
from sglang_hybrid.integration.arrivals import Arrival, create_receiver, wait_for_pages
from sglang_hybrid.integration.host_kv_pool import HostKVPool

HEADS, DIM, PAGE, LAYERS = 3, 64, 32, 2


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostKVPool]:
    for name in ("SGLANG_HYBRID_CONFIG", "SGLANG_HYBRID_SET"):
        monkeypatch.setenv(name, "")
    made = HostKVPool(
        10 * PAGE, page_size=PAGE, dtype=torch.float32, head_num=HEADS, head_dim=DIM, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    yield made
    made.region.close()


def write_as_a_peer(pool: HostKVPool, pages: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write tokens to ``pages`` of every layer as raw memory, as a transfer does.

    ``keys`` and ``values`` are ``[tokens, KV heads, dim]``.
    """
    for buffers, tokens in ((pool.k_buffer, keys), (pool.v_buffer, values)):
        for buffer in buffers:
            for number, page in enumerate(pages):
                part = tokens[number * PAGE : (number + 1) * PAGE].flatten()
                buffer[page].view(-1)[: part.numel()] = part


def test_a_transfer_is_told_of_whole_pages(pool: HostKVPool) -> None:
    addresses, sizes, items = pool.get_contiguous_buf_infos()
    page_bytes = PAGE * HEADS * DIM * 4
    assert addresses == [buffer.data_ptr() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    assert set(items) == {page_bytes}
    assert set(sizes) == {11 * page_bytes}


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 130])
def test_admitted_pages_are_what_prefill_here_would_have_written(pool: HostKVPool, tokens: int) -> None:
    keys, values = torch.randn(2, tokens, HEADS, DIM).unbind(0)
    count = -(-tokens // PAGE)
    ours, theirs = [1, 3, 5, 7, 9][:count], [10, 2, 8, 4, 6][:count]
    slots = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in ours])[:tokens]
    for layer in range(LAYERS):
        pool._store_kv_layer(layer, slots, keys, values)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[theirs] = torch.nan  # values after the last token must not matter
    write_as_a_peer(pool, theirs, keys, values)
    last = (tokens - 1) % PAGE + 1
    pool.admit(torch.tensor(theirs), last)
    for layer in range(LAYERS):
        for buffer in (pool.k_buffer[layer], pool.v_buffer[layer]):
            assert torch.equal(buffer[theirs[:-1]], buffer[ours[:-1]])
            assert torch.equal(buffer[theirs[-1], :, :last], buffer[ours[-1], :, :last])
        assert pool.digests is not None
        digests = pool.digests.of_layer(layer)
        assert torch.equal(digests[theirs], digests[ours])
        assert pool.sketches is not None
        codes = pool.sketches.of_layer(layer).codes
        assert torch.equal(codes[theirs[:-1]], codes[ours[:-1]])
        assert torch.equal(codes[theirs[-1], :, :last], codes[ours[-1], :, :last])


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_garbage_is_admitted_like_anything_else(pool: HostKVPool, garbage: float) -> None:
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(garbage)
    pool.admit(torch.tensor([1, 2]), 7)


class Receiver:
    """Stand-in for SGLang's receiver of one transfer. A test ends the transfer by setting ``status``."""

    def __init__(self) -> None:
        self.status = KVPoll.Transferring
        self.told: Any = None

    def send_metadata(self, pages: Any, aux: int, decode_prefix_len: int = 0) -> None:
        self.told = (pages.tolist(), aux, decode_prefix_len)

    def poll(self) -> Any:
        return self.status

    def abort(self) -> None:
        self.status = KVPoll.Failed

    def failure_exception(self) -> None:
        raise RuntimeError("of the transfer")


class SlowPool:
    """A pool whose ``admit`` blocks until a test sets ``go_on``."""

    page_size = PAGE
    device = "cpu"
    admission = None

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.fails = False
        self.admitted: list[tuple[list[int], int]] = []

    def admit(self, pages: torch.Tensor, last_filled: int) -> None:
        assert self.go_on.wait(30)
        if self.fails:
            raise MemoryError("of the admission")
        self.admitted.append((pages.tolist(), last_filled))


@pytest.fixture
def slow() -> Iterator[SlowPool]:
    pool = SlowPool()
    yield pool
    pool.go_on.set()


def arrival(receiver: Receiver, pool: SlowPool, tokens: int = 70) -> Arrival:
    made = Arrival(receiver, pool, lambda: tokens)  # type: ignore[arg-type]
    made.send_metadata(numpy.array([4, 9, 2], dtype=numpy.int32), 5, decode_prefix_len=0)
    return made


def finished(made: Arrival) -> Any:
    assert made._admission is not None
    made._admission.exception(timeout=30)
    return made.poll()


def test_a_transfer_succeeds_once_its_pages_are_admitted(slow: SlowPool) -> None:
    receiver = Receiver()
    made = arrival(receiver, slow)
    assert receiver.told == ([4, 9, 2], 5, 0)
    assert made.poll() == KVPoll.Transferring
    receiver.status = KVPoll.Success
    assert [made.poll(), made.poll()] == [KVPoll.Transferring] * 2
    slow.go_on.set()
    assert finished(made) == KVPoll.Success
    assert made.poll() == KVPoll.Success
    assert slow.admitted == [([4, 9, 2], 6)]  # admitted only once


def test_pages_of_an_aborted_request_are_kept_while_they_are_permuted(slow: SlowPool) -> None:
    receiver = Receiver()
    made = arrival(receiver, slow)
    receiver.status = KVPoll.Success
    made.poll()
    made.abort()
    assert made.poll() == KVPoll.Transferring
    slow.go_on.set()
    assert finished(made) == KVPoll.Failed


def test_a_transfer_that_fails_is_not_admitted(slow: SlowPool) -> None:
    made = arrival(Receiver(), slow)
    made.abort()
    assert made.poll() == KVPoll.Failed
    assert made._admission is None
    with pytest.raises(RuntimeError, match="of the transfer"):
        made.failure_exception()


def test_an_admission_that_fails_fails_its_request_with_the_reason(slow: SlowPool) -> None:
    receiver = Receiver()
    slow.fails = True
    slow.go_on.set()
    made = arrival(receiver, slow)
    receiver.status = KVPoll.Success
    made.poll()
    assert finished(made) == KVPoll.Failed
    with pytest.raises(MemoryError, match="of the admission"):
        made.failure_exception()


def test_other_pools_keep_their_receivers() -> None:
    queue, request = SimpleNamespace(token_to_kv_pool=object()), SimpleNamespace(kv_receiver=object())
    assert create_receiver(lambda *_: request, queue, "req") is request
    assert not isinstance(request.kv_receiver, Arrival)


@pytest.mark.parametrize(
    ("sleep_on_idle", "decode_instance", "idle", "rests"),
    [(True, True, False, True), (False, True, False, False), (True, False, False, False), (True, True, True, False)],
)
def test_a_decode_instance_rests_while_it_waits_for_pages(
    pool: HostKVPool,
    monkeypatch: pytest.MonkeyPatch,
    sleep_on_idle: bool,
    decode_instance: bool,
    idle: bool,
    rests: bool,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("sglang_hybrid.integration.arrivals.time.sleep", slept.append)
    scheduler = SimpleNamespace(
        idle_sleeper=object() if sleep_on_idle else None,
        disagg_decode_transfer_queue=object() if decode_instance else None,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        is_fully_idle=lambda: idle,
    )
    wait_for_pages(None, scheduler)
    assert slept == [arrivals.ASK_AGAIN_SECONDS] * rests
