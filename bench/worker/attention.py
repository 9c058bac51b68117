"""One measurement of block attention: posts of one shape go through the mailbox for a given time."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from time import perf_counter_ns

import torch

from bench.worker.bandwidth import ReadBandwidth
from bench.worker.pool import Pool, Posts
from bench.worker.running import BenchError, running
from sglang_hybrid.protocol.cores import Placement, Topology

LEAST_POSTS = 8  # minimum number of posts of a measurement
_WINDOW = 8  # posts whose times are added up for one rate
WARM_UP_POSTS = 4  # rounds of two posts before measuring: the first access to each page of a slot is a page fault


@dataclass(frozen=True)
class Rate:
    """Rate at which keys and values are attended to, in GB/s. 1 GB = 10^9 bytes."""

    median: float
    best: float
    posts: int
    read: float = 0.0  # read bandwidth of the same threads right before or after, the larger one: machines drift
    engine: float | None = None  # mean rate over the time in which the engine had posts under way
    stolen: float | None = None  # share of the tasks that another group's threads computed


def rate_of(post_bytes: int, times_ns: list[int]) -> Rate:
    rates = [post_bytes / time for time in times_ns]
    return Rate(statistics.median(rates), max(rates), len(rates))


def windows(times: list[int], size: int) -> list[list[int]]:
    """Return consecutive windows of ``size`` times. A shorter rest at the end is dropped."""
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
    """Measure the time from one post's results to the next post's results.

    The client writes a post while the engine computes the previous one, as a server does with layers. Each list is one
    task. Raise BenchError if a result is not finite or a reply is missing.
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
    # rates over several posts in a row: two posts are under way, and they need not end at equal distances
    rate = rate_of(_WINDOW * posts.post_bytes, [sum(window) for window in windows(times, _WINDOW)])
    rate = replace(rate, posts=len(times))
    read = max(before, reading.measure(placement))
    return replace(rate, read=read, engine=posts.post_bytes / busy, stolen=stolen)
