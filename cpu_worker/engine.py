"""The C++ engine of ``kernels/cpu``: reads posts from the mailbox, and answers them or lets a provider do it."""

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

_MOST = (1 << 63) - 1  # what a message can carry
_DRAIN_LOOK_S = 0.001


@dataclass(frozen=True)
class Regions:
    """What a client attached: its mailbox (we write replies to it) and its pool (we only read it)."""

    mailbox: Mapping
    pool: Mapping
    geometry: Geometry  # a copy that was checked against both sizes: the one in the mailbox may change at any time

    @property
    def posted(self) -> int:
        """Number of the newest post; 0 before the first."""
        return self._word("bell", "Bell", "posted")

    @property
    def completed(self) -> int:
        """Every post up to this one is answered or was given up."""
        return self._word("worker", "WorkerLine", "completed")

    def _word(self, place: str, record: str, field: str) -> int:
        layout = MailboxLayout()
        checked(library().sh_mailbox_layout, ctypes.byref(self.geometry), ctypes.byref(layout))
        offset, _ = mailbox_fields()[record][field]
        word = c_uint64.from_address(self.mailbox.address + getattr(layout, place) + offset)
        return min(word.value, _MOST)


class Engine:
    """Threads of the engine on attached regions, from construction to ``stop``."""

    def __init__(self, regions: Regions, plan: ThreadPlan, placement: Placement) -> None:
        """``placement.threads`` 0: no threads that compute, the owner calls ``take`` and ``answer``.

        Raises NativeError; nothing runs then.
        """
        self._regions = regions
        cores = (c_int32 * len(placement.cores))(*placement.cores) if placement.cores else None
        options = EngineOptions(
            threads=placement.threads,
            group_threads=max(1, placement.group_threads),
            task_blocks=plan.task_blocks,
            spin_us=plan.spin_us,
            cores=cores,
            variant=None,  # the fastest, or what SGLANG_HYBRID_CPU_VARIANT names
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
        """Those that compute: fewer than asked for where a limit did not allow more."""
        return int(library().sh_engine_threads(self._engine))

    def stats(self) -> StatsReport:
        raw = EngineStats()
        library().sh_engine_read_stats(self._engine, ctypes.byref(raw))
        return StatsReport(**{name: min(getattr(raw, name), _MOST) for name, *_ in EngineStats._fields_})

    def take(self, timeout_us: int) -> Job | None:
        """The next post. Its arrays are valid until ``answer``, which must follow."""
        job = Job()
        return job if library().sh_engine_take(self._engine, timeout_us, ctypes.byref(job)) else None

    def answer(self, out: int, lse: int) -> None:
        """Addresses of float arrays: out [rows][KV head][group][head_dim], lse [rows][KV head][group]."""
        library().sh_engine_answer(self._engine, out, lse)

    def drain(self, timeout_s: float) -> bool:
        """Wait until what is posted now is answered. False: it was not in time."""
        posted = self._regions.posted
        deadline = time.monotonic() + timeout_s
        while self._regions.completed < posted:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_DRAIN_LOOK_S)
        return True

    def stop(self) -> None:
        """End all threads, after the post they are at. Idempotent."""
        if self._engine is not None:
            library().sh_engine_stop(self._engine)
            self._engine = None
