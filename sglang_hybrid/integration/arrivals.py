"""Requests that a prefill instance sends to this decode instance: admission of their pages to the host pool.

The prefill instance writes whole pages into the pool, in SGLang's layout. Before a request may decode, its pages are
permuted into the pool's layout, and their digests and sketches are computed. This takes so long for long prompts that a
thread does it beside the decode steps of other requests. A request's first decode step chooses its first resident
blocks by the step's own query: the query of the prompt's last token was computed on the prefill instance.

    SGLang's queues:   prealloc ── send_metadata(pages) ── transfer ── poll ──────────── waiting ── first decode step
    here:                          Arrival learns pages    Arrival says Success once     rows begin
                                                           the thread admitted them
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from sglang.srt.disaggregation.base import KVPoll

from sglang_hybrid.integration.host_kv_pool import HostKVPool

logger = logging.getLogger("sglang.srt.hybrid")

ASK_AGAIN_SECONDS = 0.005


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="arrivals")


class Arrival:
    """Wraps SGLang's receiver of one request, and delays its success until the request's pages are admitted.

    SGLang takes the minimum of all ranks' answers, so all ranks proceed together.
    """

    def __init__(self, receiver: Any, pool: HostKVPool, tokens: Callable[[], int]) -> None:
        """``tokens`` returns the number of tokens that will arrive. It is called when the peer learns their pages."""
        self._receiver = receiver
        self._pool = pool
        self._tokens = tokens
        self._pages = torch.empty(0, dtype=torch.int64)
        self._last_filled = 0
        self._admission: Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    def send_metadata(self, kv_indices: Any, *args: Any, **kwargs: Any) -> None:
        """Send the peer the pages that it has to write, without the pages of a prefix that is in the pool already."""
        self._pages = torch.as_tensor(kv_indices).to(torch.int64)
        self._last_filled = (self._tokens() - 1) % self._pool.page_size + 1
        self._receiver.send_metadata(kv_indices, *args, **kwargs)

    def poll(self) -> Any:
        if self._admission is None:
            status = self._receiver.poll()
            if status != KVPoll.Success:
                return status
            self._admission = _thread().submit(self._admit)
        if not self._admission.done():
            # also for a request that is aborted now: its pages must not be reused while the thread permutes them
            return KVPoll.Transferring
        if error := self._admission.exception():
            logger.error("pages that arrived could not be admitted, their request fails: %r", error)
            return KVPoll.Failed
        return self._receiver.poll()

    def failure_exception(self) -> None:
        if self._admission and (error := self._admission.exception()):
            raise error
        self._receiver.failure_exception()

    def _admit(self) -> None:
        with torch.no_grad():
            self._pool.admit(self._pages, self._last_filled)
        if self._pool.admission is None and torch.device(self._pool.device).type == "cuda":
            torch.cuda.current_stream().synchronize()  # other streams read the pages next


def create_receiver(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the receiver of a new request. Hook around ``DecodePreallocQueue._create_receiver_and_enqueue``."""
    decode_request = original(queue, req, *args, **kwargs)
    if isinstance(queue.token_to_kv_pool, HostKVPool):
        decode_request.kv_receiver = Arrival(
            decode_request.kv_receiver, queue.token_to_kv_pool, lambda: queue._rebootstrap_prefill_len(req)
        )
    return decode_request


def reset_rows(batch: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Reset the rows that decode next: of requests that arrived, or that were retracted and resume.

    Hook after ``get_new_prebuilt_batch``.
    """
    if batch is not None and isinstance(scheduler.token_to_kv_pool_allocator.get_kvcache(), HostKVPool):
        scheduler.tp_worker.model_runner.attn_backend.reset_rows(batch.req_pool_indices)


def wait_for_pages(_result: Any, scheduler: Any) -> None:
    """Sleep shortly while requests wait for their pages and none decodes, with ``--sleep-on-idle``.

    Hook after ``Scheduler.on_idle``. SGLang polls transfers without a pause. Without a GPU the polling takes more than
    half of a core from a prefill instance on the same host, which computes the pages that the requests wait for.
    """
    if scheduler.idle_sleeper is None or scheduler.disagg_decode_transfer_queue is None:
        return
    if isinstance(scheduler.token_to_kv_pool_allocator.get_kvcache(), HostKVPool) and not scheduler.is_fully_idle():
        time.sleep(ASK_AGAIN_SECONDS)
