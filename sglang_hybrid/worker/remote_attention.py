"""Server of misses that posts to the CPU worker, and computes in this process if the worker does not answer in time.

With provider native both compute the same bits, so the generated text does not depend on which one computed. Counters
and the log show which one did.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from sglang_hybrid.core import BlockList, LayerCache, Partial
from sglang_hybrid.metrics import WorkerMetrics
from sglang_hybrid.metrics.distribution import Distribution
from sglang_hybrid.metrics.readings import ServedBlocks
from sglang_hybrid.metrics.waits import StepWaits
from sglang_hybrid.ops.cpu.lists import HostLists, HostSums, HostWork
from sglang_hybrid.ops.cpu.local import LocalAttention
from sglang_hybrid.protocol.mailbox import DAMAGED, OVERWRITTEN, SERVED
from sglang_hybrid.worker.connection import WorkerConnection
from sglang_hybrid.worker.fallback_log import FallbackLog
from sglang_hybrid.worker.miss_server import MissServer, PendingAttention, PendingSum, Ready, ReadySum
from sglang_hybrid.worker.supervisor import Supervisor


class WorkerMisses(MissServer):
    def __init__(
        self, supervisor: Supervisor, local: LocalAttention, deadline_s: float, metrics: WorkerMetrics
    ) -> None:
        self._supervisor = supervisor
        self._local = local
        self._deadline_s = deadline_s
        self._metrics = metrics
        self._log = FallbackLog()
        self.served = ServedBlocks("worker", "process")
        self._waits = StepWaits()

    @property
    def waits(self) -> Distribution:
        return self._waits.distribution

    def describe_worker(self) -> dict[str, Any]:
        return self._supervisor.describe()

    def wake(self) -> None:
        if link := self._supervisor.link:
            link.mailbox.wake()

    def post(
        self, query: torch.Tensor, cache: LayerCache, blocks: BlockList, scale: float, step: int
    ) -> PendingAttention:
        dtype = self._local.query_dtype
        lists = HostLists(query, blocks.ids, blocks.fill, cache.layer, scale, dtype, blocks.masks)
        if blocks.ids.shape[2] == 0:  # no row has a miss
            return Ready((torch.zeros_like(query, dtype=torch.float32), lists.lse.fill_(-torch.inf).to(query.device)))
        return _PostedLayer(self, lists, *self._send(lists, step), query.device, step)

    def post_sum(self, weights: torch.Tensor, cache: LayerCache, ids: torch.Tensor, step: int) -> PendingSum:
        sums = HostSums(weights, ids, cache.layer, cache.values.shape[3])
        if ids.shape[2] == 0:
            return ReadySum(sums.out.to(weights.device))
        return _PostedSum(self, sums, *self._send(sums, step), weights.device, step)

    def _send(self, lists: HostWork, step: int) -> tuple[WorkerConnection | None, int | None]:
        link = self._supervisor.link
        if link and link.late and link.mailbox.caught_up:
            link.late = False
        # a worker that is behind gets no new posts: every layer would wait for it in vain
        return link, link.mailbox.post(lists, step) if link and not link.late else None

    def collect(self, lists: HostWork, link: WorkerConnection | None, sequence: int | None, step: int) -> None:
        """Write the results to ``lists``. Compute here the rows that the worker did not serve in time."""
        if link is None or sequence is None:
            self.served.add("process", int(lists.blocks.sum()))
            self._compute(lists, "behind" if link else "no-worker", lists.rows)
            return
        began = time.monotonic()
        missing = link.mailbox.collect(sequence, lists, self._deadline_s, link.gone)
        self._waits.add(step, time.monotonic() - began)
        self._metrics.served("worker", lists.rows - missing)
        self._count_blocks(lists)
        if not missing:
            return
        damaged, overwritten = (int((lists.outcome == outcome).sum()) for outcome in (DAMAGED, OVERWRITTEN))
        if overwritten:  # the policy's doing: it says nothing about the worker
            self._compute(lists, "overwritten", missing)
            return
        link.late = link.late or damaged < missing
        self._compute(lists, "damaged" if damaged else "no-worker" if link.gone.value else "late", missing)

    def _count_blocks(self, lists: HostWork) -> None:
        blocks, is_served = lists.blocks, lists.outcome == SERVED
        self.served.add("worker", int(blocks[is_served].sum()))
        self.served.add("process", int(blocks[~is_served].sum()))

    def _compute(self, lists: HostWork, why: str, rows: int) -> None:
        self._local.attend(lists, lists.outcome)
        self._metrics.served(f"process-{why}", rows)
        self._log.note(why, rows)


class _Posted:
    """Lists that were posted to a worker, or are computed here when they are collected."""

    def __init__(
        self,
        misses: WorkerMisses,
        lists: HostWork,
        link: WorkerConnection | None,
        sequence: int | None,
        device: torch.device,
        step: int,
    ) -> None:
        self._misses = misses
        self._lists = lists
        self._link = link
        self._sequence = sequence
        self._device = device
        self._step = step

    def _wait(self) -> None:
        self._misses.collect(self._lists, self._link, self._sequence, self._step)


class _PostedSum(_Posted):
    def collect(self) -> torch.Tensor:
        self._wait()
        return self._lists.out.to(self._device)


class _PostedLayer(_Posted):
    def collect(self) -> Partial:
        self._wait()
        return self._lists.out.to(self._device), self._lists.lse.to(self._device)
