"""A mailbox with an engine and a client, all in this process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bench.worker.pool import BLOCK_TOKENS, Pool
from sglang_hybrid.ops.cpu.library import checked, library
from sglang_hybrid.ops.cpu.lists import HostLists
from sglang_hybrid.ops.cpu.structs import EngineOptions, EngineStats, Geometry
from sglang_hybrid.protocol.cores import Placement, Topology
from sglang_hybrid.protocol.mailbox import Mailbox
from sglang_hybrid.protocol.messages import SPIN_US

_TIMEOUT_S = 60.0


class BenchError(RuntimeError):
    """A measurement that is not valid. The message says what happened."""


@dataclass
class Flight:
    """One post under way, with the tensors that its lists point into."""

    lists: HostLists
    pages: torch.Tensor
    sequence: int = 0


class RunningEngine:
    """An engine whose threads answer posts until ``stop``, and a client that posts to it."""

    def __init__(
        self, pool: Pool, geometry: Geometry, placement: Placement, task_blocks: int, variant: str | None
    ) -> None:
        """Start the engine. Raise RegionError or NativeError if that fails; then no thread runs."""
        self._mailbox = Mailbox(geometry)
        self._gone = ctypes.c_uint32(0)
        self._geometry = geometry
        options = EngineOptions(
            threads=placement.threads,
            group_threads=placement.group_threads,
            task_blocks=task_blocks,
            spin_us=SPIN_US,
            cores=core_array(placement.cores),
            variant=variant.encode() if variant else None,
        )
        self._engine: int | None = checked(
            library().sh_engine_start,
            self._mailbox.region.address, pool.address, ctypes.byref(geometry), ctypes.byref(options),
        )  # fmt: skip

    def lists(self, query: torch.Tensor, pages: torch.Tensor) -> HostLists:
        """Return lists of full blocks: query ``[rows, query heads, head_dim]``, pages ``[rows, KV heads, blocks]``.

        Page -1 marks the end of a shorter list.
        """
        scale = float(query.shape[2] ** -0.5)
        return HostLists(query, pages, torch.full_like(pages, BLOCK_TOKENS), 0, scale, query.dtype)

    def flight(self, query: torch.Tensor, pages: torch.Tensor) -> Flight:
        return Flight(self.lists(query, pages), pages)

    def post(self, flight: Flight, pages: torch.Tensor) -> None:
        """Post the flight's query with ``pages``, which have the shape of the flight's first pages."""
        flight.pages = pages
        flight.lists.struct.pages = pages.data_ptr()
        flight.sequence = self._mailbox.post(flight.lists, generation=1)

    def collect(self, flight: Flight) -> None:
        """Wait for all replies of the flight's post. Raise BenchError if a reply is missing."""
        self._collect(flight.sequence, flight.lists)

    def round_trip(self, lists: HostLists) -> None:
        """Post and wait for all replies. Raise BenchError if a reply is missing."""
        self._collect(self._mailbox.post(lists, generation=1), lists)

    def _collect(self, sequence: int, lists: HostLists) -> None:
        if missing := self._mailbox.collect(sequence, lists, _TIMEOUT_S, self._gone):
            raise BenchError(f"the engine did not answer {missing} of {lists.rows} rows within {_TIMEOUT_S:.0f} s")

    def answered(self, lists: HostLists) -> None:
        """Post and wait until the engine has completed the post, without reading the replies."""
        self._mailbox.post(lists, generation=1)
        while not self._mailbox.caught_up:
            pass

    def stats(self) -> EngineStats:
        """Return statistics of all posts so far. Waits until all posts are counted, a little after their replies."""
        while not self._mailbox.caught_up:
            os.sched_yield()  # the engine's thread may be waiting for this core
        stats = EngineStats()
        library().sh_engine_read_stats(self._engine, ctypes.byref(stats))
        return stats

    def stop(self) -> None:
        if self._engine is not None:
            library().sh_engine_stop(self._engine)
            self._engine = None
            self._mailbox.region.close()


@contextmanager
def running(
    pool: Pool,
    geometry: Geometry,
    placement: Placement,
    topology: Topology,
    task_blocks: int,
    variant: str | None = None,
) -> Iterator[RunningEngine]:
    engine = RunningEngine(pool, geometry, placement, task_blocks, variant)
    allowed = os.sched_getaffinity(0)
    try:
        # after the engine's start: new threads inherit the affinity of the thread that starts them
        if core := client_cpus(topology, placement):
            os.sched_setaffinity(0, core)
        yield engine
    finally:
        os.sched_setaffinity(0, allowed)
        engine.stop()


def client_cpus(topology: Topology, placement: Placement) -> set[int]:
    """Return the CPUs for the thread that posts. Empty: no restriction, since the engine's threads are not bound.

    They are the CPUs of cores without an engine thread, or else the last engine thread's CPU, not the first one's: the
    first thread opens the rows that all others wait for.
    """
    if not placement.cores:
        return set()
    free = {cpu for core in topology.cores if not set(core.cpus) & set(placement.cores) for cpu in core.cpus}
    return free or {placement.cores[-1]}


def core_array(cores: Sequence[int]) -> ctypes.Array[ctypes.c_int32] | None:
    return (ctypes.c_int32 * len(cores))(*cores) if cores else None
