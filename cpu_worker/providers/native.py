"""The default provider: the engine's own threads run the C++ kernels."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

from cpu_worker.engine import Engine, Regions
from cpu_worker.population import Population
from cpu_worker.providers.base import Provider
from sglang_hybrid.ops.cpu.library import checked, library
from sglang_hybrid.ops.cpu.structs import BlockAttention, pool_itemsize, query_itemsize
from sglang_hybrid.protocol.cores import Placement
from sglang_hybrid.protocol.messages import Planned, StatsReport, ThreadPlan

log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes, alignment of queries, see block_attention.h


class NativeProvider(Provider):
    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._regions: Regions | None = None
        self._population: Population | None = None

    def start(self, regions: Regions, plan: ThreadPlan, placement: Placement, failed: Callable[[str], None]) -> Planned:
        self._engine = Engine(regions, plan, placement)
        self._regions, threads = regions, self._engine.threads
        if threads < placement.threads:
            log.warning("%d of %d threads could be started: a limit on threads or memory", threads, placement.threads)
        variant = library().sh_variant_name(regions.geometry.dtype, regions.geometry.head_dim, None)
        return Planned(
            provider="native",
            variant=variant.decode(),  # the engine would not have started without one
            threads=threads,
            group_threads=placement.group_threads,
            cores=list(placement.cores),
        )

    def warm_up(self, cancelled: Callable[[], bool]) -> None:
        assert self._regions is not None
        self._regions.mailbox.populate(1, cancelled)
        _run_kernel_once(self._regions)
        # in the background: a worker that replaces another is needed at once, and the pool may be terabytes
        if self._population is None:
            self._population = Population(self._regions.pool)

    def stats(self) -> StatsReport:
        assert self._engine is not None
        return self._engine.stats()

    def drain(self, timeout_s: float) -> bool:
        assert self._engine is not None
        return self._engine.drain(timeout_s)

    def stop(self) -> None:
        if self._population is not None:
            self._population.stop()
            self._population = None
        if self._engine is not None:
            self._engine.stop()
            self._engine = None


def _run_kernel_once(regions: Regions) -> None:
    """Run the kernel for a query of zeros over page 0, which holds no request's tokens, to load the kernel's code."""
    shape, pool = regions.geometry, regions.pool.address
    query = ctypes.create_string_buffer(shape.group * shape.head_dim * query_itemsize(shape.dtype) + _ALIGNMENT)
    out = (ctypes.c_float * (shape.group * shape.head_dim))()
    lse = (ctypes.c_float * shape.group)()
    task = BlockAttention(
        query=-(-ctypes.addressof(query) // _ALIGNMENT) * _ALIGNMENT,
        keys=pool + shape.keys,
        values=pool + shape.values,
        page_stride=shape.kv_heads * 32 * shape.head_dim * pool_itemsize(shape.dtype),
        pages=(ctypes.c_uint32 * 1)(0),
        count=1,
        last_fill=32,
        group=shape.group,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        scale=1.0,
        out=out,
        lse=lse,
    )
    checked(library().sh_attend, ctypes.byref(task), None)
