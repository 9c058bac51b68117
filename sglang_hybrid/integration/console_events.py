"""Send events about SGLang to the launcher's console: the model, the pool, the worker, and the batches that run.

The console must never end a server: if SGLang's objects are not as expected, no more events are sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from sglang_hybrid import events
from sglang_hybrid.worker.supervisor import Supervisor

logger = logging.getLogger("sglang.srt.hybrid")

_DECODE_SECONDS = 0.5  # at least, between two events about decode steps


def tell_pool(configurator: Any, tokens: int, pool: Any) -> None:
    """Send events about the model and the KV cache of this rank, once the pool exists."""
    model, device = configurator.model_config, str(configurator.device)
    events.tell(
        events.Model(
            layers=model.num_hidden_layers,
            dtype=str(model.dtype).removeprefix("torch."),
            device=device,
            context_tokens=model.context_len,
        )
    )
    on_device = torch.cuda.memory_allocated() if device.startswith("cuda") else 0
    events.tell(events.Pool(tokens=tokens, host_bytes=pool.region.size, device_bytes=on_device))


def tell_worker(supervisor: Supervisor) -> None:
    if link := supervisor.link:
        plan = link.planned
        events.tell(events.Worker(pid=link.pid, provider=plan.provider, variant=plan.variant, threads=plan.threads))


class _Batches:
    """Counts the batches and tokens of the scheduler process, and sends events about them now and then."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._tokens = 0
        self._is_idle = True

    def begins(self, scheduler: Any, batch: Any) -> None:
        running, waiting, now = len(batch.reqs), len(scheduler.waiting_queue), time.monotonic()
        if self._is_idle:
            self._is_idle, self._since, self._tokens = False, now, 0
        if batch.forward_mode.is_decode():
            self._tokens += running
            if now - self._since >= _DECODE_SECONDS:
                seconds = now - self._since
                events.tell(events.Decode(running=running, waiting=waiting, tokens=self._tokens, seconds=seconds))
                self._since, self._tokens = now, 0
        elif batch.forward_mode.is_extend():
            total = sum(len(request.origin_input_ids) for request in batch.reqs)
            done, chunk = sum(batch.prefix_lens), sum(batch.extend_lens)
            events.tell(events.Prefill(done=done, chunk=chunk, total=total, running=running, waiting=waiting))
            self._since, self._tokens = now, 0  # a prompt's time is not time of decode steps

    def idle(self) -> None:
        if not self._is_idle:
            self._is_idle = True
            events.tell(events.Idle())


_batches = _Batches()
_failed = False


def _safely(tell: Callable[[], None]) -> None:
    global _failed
    if _failed or not events.enabled():
        return
    try:
        tell()
    except (AttributeError, TypeError) as error:
        _failed = True
        logger.warning("the console shows no progress: this SGLang's batches are not as expected (%s)", error)


def batch_begins(scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """Count a batch that is about to run. Hook before ``Scheduler.run_batch``."""
    _safely(lambda: _batches.begins(scheduler, batch))


def scheduler_is_idle(_scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Send an event when no batch runs any more. Hook before ``Scheduler.on_idle``."""
    _safely(_batches.idle)
