"""One measurement of block attention: posts of one shape through the mailbox, for a while."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from time import perf_counter_ns

import torch

from bench.worker.bandwidth import ReadBandwidth
from bench.worker.pool import Pool, Posts
from bench.worker.running import BenchError, running
from sglang_hybrid.protocol.cores import Placement, Topology

LEAST_POSTS = 8
_WINDOW = 8  # posts
WARM_UP_POSTS = 4  # both slots of the mailbox, twice: what is touched first costs a page fault


@dataclass(frozen=True)
class Rate:
    """GB/s of keys and values, 1 GB = 10^9 bytes."""

    median: float
    best: float
    posts: int
    read: float = 0.0  # what the same threads read right before or after, whichever is more: machines drift
    engine: float | None = None  # mean, of the time in which posts were under way
    stolen: float | None = None  # share of the tasks that were computed outside their own group


def rate_of(post_bytes: int, times_ns: list[int]) -> Rate:
    rates = [post_bytes / time for time in times_ns]
    return Rate(statistics.median(rates), max(rates), len(rates))


def windows(times: list[int], size: int) -> list[list[int]]:
    """Consecutive runs of ``size``; what is left over at the end is dropped."""
    return [times[start : start + size] for start in range(0, len(times) - size + 1, size)]


def measure_attention(
    pool: Pool,
    reading: ReadBandwidth,
    posts: Posts,
    dtype: str,
    variant: str,
    placement: Placement,
    topology: Topology,
    seconds: float,
) -> Rate:
    """From results to results, one post being computed while the next one is written: a server's layers.

    All lists are one task each.
    """
    geometry = pool.geometry(dtype, posts.rows, posts.blocks)
    before = reading.measure(placement)
    with running(pool, geometry, placement, topology, posts.blocks, variant) as engine:
        walk = posts.walk()
        flights = [engine.flight(posts.query, next(walk)) for _ in range(2)]
        for _ in range(WARM_UP_POSTS):
            for flight in flights:
                engine.post(flight, next(walk))
                engine.collect(flight)
        if not all(torch.isfinite(flight.lists.lse).all() for flight in flights):
            raise BenchError(f"variant {variant} gave a result that is not finite: its speed means nothing")
        first = engine.stats()
        times: list[int] = []
        engine.post(flights[0], next(walk))
        started = last = perf_counter_ns()
        while last - started < seconds * 1e9 or len(times) < LEAST_POSTS:
            engine.post(flights[1], next(walk))
            engine.collect(flights[0])
            flights.reverse()
            now = perf_counter_ns()
            times.append(now - last)
            last = now
        engine.collect(flights[0])
        done = engine.stats()
    stolen = (done.stolen_tasks - first.stolen_tasks) / (done.tasks - first.tasks)
    busy = (done.busy_ns - first.busy_ns) / (done.posts - first.posts)
    # of several posts in a row: the two on their way need not end in equal distances
    rate = rate_of(_WINDOW * posts.post_bytes, [sum(window) for window in windows(times, _WINDOW)])
    rate = replace(rate, posts=len(times))
    read = max(before, reading.measure(placement))
    return replace(rate, read=read, engine=posts.post_bytes / busy, stolen=stolen)
