"""The C++ engine of ``kernels/cpu``, which reads posts from the mailbox, and computes them or lets a provider do so."""

from __future__ import annotations

import ctypes
import time
from ctypes import c_int32, c_uint64
from dataclasses import dataclass

from cpu_worker.mapping import Mapping
from sglang_hybrid.ops.cpu.library import checked, library, mailbox_fields
from sglang_hybrid.ops.cpu.structs import EngineOptions, EngineStats, Geometry, Job, MailboxLayout
from sglang_hybrid.protocol.cores import Placement
from sglang_hybrid.protocol.messages import StatsReport, ThreadPlan

_MOST = (1 << 63) - 1  # the largest integer that a message can carry
_DRAIN_LOOK_S = 0.001


@dataclass(frozen=True)
class Regions:
    """The regions that a client attached: its mailbox, which receives replies, and its pool, which is only read."""

    mailbox: Mapping
    pool: Mapping
    geometry: Geometry  # a checked copy, since the geometry in the mailbox may change at any time

    @property
    def posted(self) -> int:
        """Sequence number of the newest post; 0 before the first post."""
        return self._word("bell", "Bell", "posted")

    @property
    def completed(self) -> int:
        """Sequence number up to which every post is answered or was given up."""
        return self._word("worker", "WorkerLine", "completed")

    def _word(self, place: str, record: str, field: str) -> int:
        layout = MailboxLayout()
        checked(library().sh_mailbox_layout, ctypes.byref(self.geometry), ctypes.byref(layout))
        offset, _ = mailbox_fields()[record][field]
        word = c_uint64.from_address(self.mailbox.address + getattr(layout, place) + offset)
        return min(word.value, _MOST)


class Engine:
    """An engine that serves attached regions from construction to ``stop``."""

    def __init__(self, regions: Regions, plan: ThreadPlan, placement: Placement) -> None:
        """Start the engine. With ``placement.threads`` 0 no thread computes: the owner calls ``take`` and ``answer``.

        Raise NativeError if the engine cannot be started; then no thread runs.
        """
        self._regions = regions
        cores = (c_int32 * len(placement.cores))(*placement.cores) if placement.cores else None
        options = EngineOptions(
            threads=placement.threads,
            group_threads=max(1, placement.group_threads),
            task_blocks=plan.task_blocks,
            spin_us=plan.spin_us,
            cores=cores,
            variant=None,  # the fastest variant, or the one that SGLANG_HYBRID_CPU_VARIANT names
        )
        self._engine: int | None = checked(
            library().sh_engine_start,
            regions.mailbox.address,
            regions.pool.address,
            ctypes.byref(regions.geometry),
            ctypes.byref(options),
        )

    @property
    def threads(self) -> int:
        """Number of threads that compute. It is lower than requested if the system did not allow more threads."""
        return int(library().sh_engine_threads(self._engine))

    def stats(self) -> StatsReport:
        raw = EngineStats()
        library().sh_engine_read_stats(self._engine, ctypes.byref(raw))
        return StatsReport(**{name: min(getattr(raw, name), _MOST) for name, *_ in EngineStats._fields_})

    def take(self, timeout_us: int) -> Job | None:
        """Wait for the next post and return it, or None after ``timeout_us``. One thread at a time.

        The arrays of the job are valid until ``answer``, which the caller must call next.
        """
        job = Job()
        return job if library().sh_engine_take(self._engine, timeout_us, ctypes.byref(job)) else None

    def answer(self, out: int, lse: int) -> None:
        """Reply to the job taken last. ``out`` and ``lse`` are addresses of float arrays.

        out: [rows][KV head][group][head_dim], lse: [rows][KV head][group].
        """
        library().sh_engine_answer(self._engine, out, lse)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all current posts are completed. Return False if this takes longer than ``timeout_s``."""
        posted = self._regions.posted
        deadline = time.monotonic() + timeout_s
        while self._regions.completed < posted:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_DRAIN_LOOK_S)
        return True

    def stop(self) -> None:
        """End all threads after the current posts. Further calls do nothing."""
        if self._engine is not None:
            library().sh_engine_stop(self._engine)
            self._engine = None
