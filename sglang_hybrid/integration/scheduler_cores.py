"""CPU affinity that keeps the scheduler process off the cores that its worker is bound to."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable

from sglang_hybrid.protocol.cores import other_cpus, read_topology

logger = logging.getLogger("sglang.srt.hybrid")


class SchedulerCores:
    """The cores of the scheduler process on a GPU host. Without a GPU, SGLang computes in this process, on all cores.

    While no worker runs, the process may use all its original cores. A new worker inherits this affinity, so that it
    can choose among all of them too.
    """

    def __init__(self, move: Callable[[Iterable[int]], None] | None = None) -> None:
        self._all = frozenset(os.sched_getaffinity(0))
        self._move = move or move_threads

    def leave(self, bound: Iterable[int]) -> None:
        """Run only on cores without CPUs in ``bound``, or on all original cores if no other core is left."""
        self._move(other_cpus(read_topology(self._all), bound) or self._all)


def move_threads(cpus: Iterable[int]) -> None:
    """Set the affinity of every thread of this process to ``cpus``. Threads that start later inherit it."""
    cpus = set(cpus)
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            try:
                os.sched_setaffinity(thread, cpus)
            except OSError as error:
                if isinstance(error, ProcessLookupError):
                    raise
                logger.warning("the scheduler may run on the worker's cores: %s", error)
                return
