"""Measurement of provider ``torch`` or ``ipex`` with the same posts: gather the blocks, then flash attention."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns

import torch

from bench.worker.attention import LEAST_POSTS, Rate, rate_of
from bench.worker.pool import BLOCK_TOKENS, Pool, Posts
from cpu_worker import providers
from cpu_worker.providers.torch import Kernel, TorchProvider, attend
from sglang_hybrid.protocol.cores import Placement

_WARM_UP_POSTS = 2


def measure_provider(name: str, pool: Pool, posts: Posts, dtype: str, placement: Placement, seconds: float) -> Rate:
    """Measure a provider's attention without a mailbox.

    Raise RuntimeError if the provider is not installed or does not support the dtype or shape.
    """
    provider = providers.create("ipex" if name == "ipex" else "torch")
    assert isinstance(provider, TorchProvider)
    kernel = provider.kernel()

    def run() -> Rate:
        # like the provider's thread: torch's threads inherit the affinity of this thread, which starts them
        if placement.cores:
            os.sched_setaffinity(0, placement.cores)
        torch.set_num_threads(placement.threads)
        with torch.inference_mode():
            return _measure(pool, posts, dtype, seconds, kernel)

    # in a thread of its own: torch's threads belong to the thread that started them, and end with it
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(run).result()


def _measure(pool: Pool, posts: Posts, dtype: str, seconds: float, kernel: Kernel) -> Rate:
    keys, values = pool.tensors(dtype)
    heads, head_dim = keys.shape[1], keys.shape[3]
    query = posts.query.view(posts.rows, heads, -1, head_dim)
    count = torch.full((posts.rows, heads), posts.blocks)
    last_fill = torch.full_like(count, BLOCK_TOKENS)
    walk = posts.walk()
    times: list[int] = []
    for _ in range(_WARM_UP_POSTS):
        attend(query, keys, values, next(walk), count, last_fill, float(head_dim**-0.5), kernel)
    end = perf_counter_ns() + int(seconds * 1e9)
    while perf_counter_ns() < end or len(times) < LEAST_POSTS:
        pages = next(walk)
        start = perf_counter_ns()
        attend(query, keys, values, pages, count, last_fill, float(head_dim**-0.5), kernel)
        times.append(perf_counter_ns() - start)
    return rate_of(posts.post_bytes, times)
