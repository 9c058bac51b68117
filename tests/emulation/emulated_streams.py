"""Pytest plugin, used with ``emulated_device``: streams and events without a GPU, and a stand-in for FlashInfer.

Work is queued, and runs when the host waits for it. The next stream is chosen at random among those that no event
blocks. So code that lacks an event fails sooner or later.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import emulated_device
import selection_cases
import torch

from sglang_hybrid.engines.cuda import prefill
from sglang_hybrid.ops import reference

_order = random.Random(1)
_kept: list[object] = []  # tensors of queued work: a GPU's allocator frees memory only in the order of its stream


class Stream:
    everyone: list[Stream] = []  # noqa: RUF012
    current: Stream
    cuda_stream = None

    def __init__(self, _device: object = None, _priority: int = 0) -> None:
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()  # (is it ready, do it)
        Stream.everyone.append(self)

    def wait_event(self, event: Event) -> None:
        number = event.records
        self.queue.append((lambda: event.reached >= number, lambda: None))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self, **_: object) -> None:
        self.records = self.reached = 0

    def record(self, stream: Stream | None = None) -> None:
        self.records += 1
        number = self.records

        def reach() -> None:
            self.reached = number

        (stream or Stream.current).queue.append((lambda: True, reach))

    def synchronize(self) -> None:
        while self.reached < self.records:
            run_one([stream for stream in Stream.everyone if stream.queue])


def run_one(busy: list[Stream]) -> None:
    ready = [stream for stream in busy if stream.queue[0][0]()]
    assert ready, "streams wait for each other"
    _order.choice(ready).queue.popleft()[1]()


def run_all(*_: object) -> None:
    while busy := [stream for stream in Stream.everyone if stream.queue]:
        run_one(busy)
    _kept.clear()


@contextlib.contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, chosen
    yield
    Stream.current = before


def enqueue(work: Callable[[], None]) -> None:
    Stream.current.queue.append((lambda: True, work))


class PagedAttention:
    """Stand-in for FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper``, with the methods that prefill uses."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert kv_layout == "HND"

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        *, causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert causal and {qo_indptr.dtype, paged_kv_indptr.dtype, paged_kv_indices.dtype} == {torch.int32}
        self.queries, self.starts = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.slots, self.last = paged_kv_indices, paged_kv_last_page_len.tolist()
        self.scale, self.page_size = sm_scale, page_size
        self.dtypes = q_data_type, kv_data_type

    def run(
        self, query: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor,
        k_scale: float = 1.0,
    ) -> None:  # fmt: skip
        assert query.shape[0] == self.queries[-1]
        plan = dict(vars(self))
        assert plan.pop("dtypes") == (query.dtype, caches[0].dtype)
        plan["scale"] *= k_scale

        def work() -> None:
            self.attend(query, caches, out, **plan)

        enqueue(work)

    @staticmethod
    def attend(
        query: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor,
        queries: list[int], starts: list[int], slots: torch.Tensor, last: list[int], scale: float, page_size: int,
    ) -> None:  # fmt: skip
        for row, tokens in enumerate(last):
            pages = slots[starts[row] : starts[row + 1]].long()
            length = (len(pages) - 1) * page_size + tokens
            keys, values = (part[pages].transpose(0, 1).flatten(1, 2)[:, :length].float() for part in caches)
            part = slice(queries[row], queries[row + 1])
            out[part] = reference.attend_prefill(query[part].float(), keys, values, scale).to(out.dtype)


def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    def kept(*arguments: Any) -> Any:
        _kept.append(function(*arguments))
        return _kept[-1]

    return kept


Stream.current = Stream()
emulated_device.run = selection_cases.later = enqueue
prefill._tokens_contiguous = keeping(prefill._tokens_contiguous)
prefill.DevicePrefill._on_device = keeping(prefill.DevicePrefill._on_device)
torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = Stream, Event, stream
torch.cuda.current_stream = lambda *_: Stream.current
torch.cuda.synchronize = run_all
torch.Tensor.pin_memory = lambda self: self
torch.Tensor.record_stream = lambda self, _stream: _kept.append(self)
sys.modules["flashinfer"] = types.ModuleType("flashinfer")
sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper = PagedAttention
