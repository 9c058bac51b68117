"""One measurement of block attention: posts of one shape through the mailbox, for a while."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from time import perf_counter_ns

import torch

from cpu_worker.bench.pool import Pool, Posts
from cpu_worker.bench.running import BenchError, running
from cpu_worker.cores import Placement, Topology

LEAST_POSTS = 5
WARM_UP_POSTS = 4  # both slots of the mailbox, twice: what is touched first costs a page fault


@dataclass(frozen=True)
class Rate:
    """GB/s of keys and values, 1 GB = 10^9 bytes."""

    median: float
    best: float
    posts: int
    engine: float | None = None  # median from the arrival of a post to its last reply: without posting and collecting
    stolen: float | None = None  # share of the tasks that were computed outside their own group


def rate_of(post_bytes: int, times_ns: list[int]) -> Rate:
    rates = [post_bytes / time for time in times_ns]
    return Rate(statistics.median(rates), max(rates), len(rates))


def measure_attention(
    pool: Pool, posts: Posts, dtype: str, variant: str, placement: Placement, topology: Topology, seconds: float
) -> Rate:
    """Time from before a post until its results are copied out, all lists being one task each."""
    geometry = pool.geometry(dtype, posts.rows, posts.blocks)
    with running(pool, geometry, placement, topology, posts.blocks, variant) as engine:
        walk = posts.walk()
        lists = engine.lists(posts.query, next(walk))
        for _ in range(WARM_UP_POSTS):
            lists.struct.pages = next(walk).data_ptr()
            engine.round_trip(lists)
        if not torch.isfinite(lists.lse).all():
            raise BenchError(f"variant {variant} gave a result that is not finite: its speed means nothing")
        first = last = engine.stats()
        times: list[int] = []
        busy: list[int] = []
        end = perf_counter_ns() + int(seconds * 1e9)
        while perf_counter_ns() < end or len(times) < LEAST_POSTS:
            lists.struct.pages = next(walk).data_ptr()
            start = perf_counter_ns()
            engine.round_trip(lists)
            times.append(perf_counter_ns() - start)
            before, last = last, engine.stats()
            busy.append(last.busy_ns - before.busy_ns)
    stolen = (last.stolen_tasks - first.stolen_tasks) / (last.tasks - first.tasks)
    return replace(rate_of(posts.post_bytes, times), engine=rate_of(posts.post_bytes, busy).median, stolen=stolen)
