"""Publish metrics from hooks in SGLang's scheduler: when a batch begins, and when the server is idle.

Metrics must never end a server: if SGLang's objects are not as expected, these hooks publish nothing more.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang_hybrid.integration.backend_of import backend_of
from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.metrics.server import ServerMetrics

logger = logging.getLogger("sglang.srt.hybrid")

_failed = False


def batch_begins(scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """Record the batch that begins, and publish if it is time. Hook before ``Scheduler.run_batch``."""

    def tell(metrics: ServerMetrics) -> None:
        rows = len(batch.reqs) if batch.forward_mode.is_decode() else None
        metrics.batch_begins(rows, functools.partial(pool_bytes, scheduler))

    _safely(scheduler, tell)


def scheduler_is_idle(scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Record that the server is idle, and publish. Hook before ``Scheduler.on_idle``."""
    _safely(scheduler, lambda metrics: metrics.rests(functools.partial(pool_bytes, scheduler)))


def _safely(scheduler: Any, tell: Callable[[ServerMetrics], None]) -> None:
    global _failed
    if _failed:
        return
    try:
        backend = backend_of(scheduler)
        if backend is not None and backend.metrics is not None:
            tell(backend.metrics)
    except (AttributeError, TypeError, OSError, ValueError) as error:
        _failed = True
        logger.warning("some metrics are not published any more: this SGLang is not as expected (%r)", error)


def pool_bytes(scheduler: Any) -> tuple[int, int]:
    """Return the bytes of the host pool that requests hold, and the pool's size in bytes, as SGLang counts tokens."""
    allocator, tokens = scheduler.token_to_kv_pool_allocator, scheduler.max_total_num_tokens
    free = allocator.available_size() + scheduler.tree_cache.evictable_size()
    per_token = bytes_per_token(allocator.get_kvcache())
    return max(0, tokens - free) * per_token, tokens * per_token


def bytes_per_token(pool: HostKVPool) -> int:
    keys, values = pool.k_buffer[0], pool.v_buffer[0]
    of_layer = sum(part.shape[1] * part.shape[3] * part.itemsize for part in (keys, values))
    return int(of_layer * pool.layer_num)
