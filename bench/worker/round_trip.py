"""Time of the round trip of a posted layer without blocks to compute: the cost of the mailbox itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import torch

from bench.worker.arguments import Settings, query_dtype
from bench.worker.pool import Pool
from bench.worker.running import running
from sglang_hybrid.ops.cpu import library
from sglang_hybrid.protocol.cores import Placement, Topology

ROWS = 64
_TRIPS = 2500
_WARM_UP = 200


@dataclass(frozen=True)
class Times:
    """Statistics of one action's durations, in microseconds."""

    median: float
    p99: float
    min: float


@dataclass(frozen=True)
class RoundTrip:
    rows: int
    trips: int
    threads: int
    collected: Times  # from before the post until its results are copied out
    answered: Times  # from before the post until the worker has completed it, without collecting results
    python_call: float  # median of one library call that does nothing; each trip has two or more calls


def measure_round_trip(
    pool: Pool, settings: Settings, dtype: str, placement: Placement, topology: Topology
) -> RoundTrip:
    """Measure round trips as a server's Python code sees them. Posts follow at once, so that the worker stays awake."""
    query = torch.zeros(
        ROWS, settings.kv_heads * settings.group, settings.head_dim, dtype=getattr(torch, query_dtype(dtype))
    )
    no_blocks = torch.full((ROWS, settings.kv_heads, 1), -1)
    with running(pool, pool.geometry(dtype, ROWS, 1), placement, topology, task_blocks=1) as engine:
        lists = engine.lists(query, no_blocks)
        return RoundTrip(
            rows=ROWS,
            trips=_TRIPS,
            threads=placement.threads,
            collected=_times(lambda: engine.round_trip(lists)),
            answered=_times(lambda: engine.answered(lists)),
            python_call=_times(library().sh_interface_version).median,
        )


def _times(trip: Callable[[], object]) -> Times:
    for _ in range(_WARM_UP):
        trip()
    times = []
    for _ in range(_TRIPS):
        start = perf_counter_ns()
        trip()
        times.append((perf_counter_ns() - start) / 1000)
    return Times(statistics.median(times), statistics.quantiles(times, n=100)[98], min(times))
