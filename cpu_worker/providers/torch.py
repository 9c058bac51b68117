"""Provider that uses torch's CPU attention: a baseline for the native kernels, and for hosts without such kernels.

A Python thread takes posts from the engine, gathers their blocks and calls flash attention.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from cpu_worker.engine import Engine, Regions
from cpu_worker.providers.base import Provider, ProviderError
from sglang_hybrid.ops.cpu.structs import SUM_VALUES, Geometry, Job, is_fp8, query_code
from sglang_hybrid.protocol.cores import Placement
from sglang_hybrid.protocol.messages import Planned, StatsReport, ThreadPlan

try:
    import torch
except ImportError as error:
    raise ProviderError(
        f"provider torch needs torch in the worker's environment ({error}): install it there, or use provider=native"
    ) from error

_BLOCK_TOKENS = 32
_TAKE_US = 100_000  # microseconds after which the thread looks whether it has to stop
_CHUNK_BYTES = 4 << 20  # bytes of keys and values gathered per thread, few enough to stay in cache
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of queries, by their code in structs.DTYPES

log = logging.getLogger(__name__)

# query, keys, values [n, 1, tokens, D] and a scale -> output [n, 1, G, D] and natural-log LSE [n, 1, G]
Kernel: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float],
    tuple[torch.Tensor, torch.Tensor],
]


def flash_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, scale=scale
    )
    return result


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    count: torch.Tensor,
    last_fill: torch.Tensor,
    scale: float,
    kernel: Kernel = flash_attention,
    masks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``reference.attend_blocks`` for block lists in the form that a post has.

    query ``[B, H, G, D]``; keys, values: pools ``[pages, H, 32, D]``; pages ``[B, H, N]``, of which the first
    ``count[b, h]`` are the list; the last block of a list has ``last_fill[b, h]`` tokens -> out ``[B, H, G, D]`` (0 for
    an empty list) and lse ``[B, H, G]`` (``-inf`` for an empty list), both float32. Page numbers are not checked. With
    ``masks`` ``[B, H, N]`` only tokens count whose bit is set.

    The G query heads of a (row, KV head) become the sequence of one batch entry of the kernel, so that their blocks are
    read once. Entries with equally many tokens are computed together.
    """
    out = torch.zeros(query.shape, dtype=torch.float32)
    lse = torch.full(query.shape[:3], -torch.inf)
    tokens = torch.where(count > 0, (count - 1) * _BLOCK_TOKENS + last_fill, 0)
    order = None if masks is None else _counted_first(tokens, masks)
    if order is not None:
        tokens = order.counted
    pair_bytes = 2 * _BLOCK_TOKENS * query.shape[3] * query.element_size()
    for length in tokens.unique().tolist():
        if length == 0:
            continue
        blocks = -(-length // _BLOCK_TOKENS)
        rows, heads = (tokens == length).nonzero(as_tuple=True)
        # at least one pair per thread, otherwise some threads would be idle
        chunk = torch.get_num_threads() * max(1, _CHUNK_BYTES // (pair_bytes * blocks))
        for row, head in zip(rows.split(chunk), heads.split(chunk), strict=True):
            if order is None:
                listed = pages[row, head, :blocks]
                k, v = (pool[listed, head[:, None]].flatten(1, 2)[:, None, :length] for pool in (keys, values))
            else:
                token = order.tokens[row, head, :length]
                page = pages[row, head].gather(1, token // _BLOCK_TOKENS)
                k, v = (pool[page, head[:, None], token % _BLOCK_TOKENS][:, None] for pool in (keys, values))
            k, v = k.to(query.dtype), v.to(query.dtype)  # the conversion of FP8 is exact
            partial, sums = kernel(query[row, head][:, None], k, v, scale)
            out[row, head] = partial.squeeze(1).float()
            lse[row, head] = sums.reshape(len(row), -1).float()
    return out, lse


def sum_values(
    weights: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``reference_weights.sum_values`` for block lists in the form that a post has.

    weights ``[B, H, G, N, 32]``, of which those of the first ``count[b, h]`` blocks count; values: a pool
    ``[pages, H, 32, D]`` -> out ``[B, H, G, D]`` (0 for an empty list) and lse ``[B, H, G]`` (0, or ``-inf`` for an
    empty list). A value whose weights are all 0 is left out, whatever the value is.
    """
    out = torch.zeros(*weights.shape[:3], values.shape[3])
    lse = torch.where(count > 0, 0.0, -torch.inf)[..., None].expand(weights.shape[:3]).contiguous()
    for row, head in (count > 0).nonzero().tolist():
        blocks = int(count[row, head])
        by = weights[row, head, :, :blocks].flatten(1)
        asked = (by != 0).any(dim=0).nonzero().squeeze(1)
        page = pages[row, head].gather(0, asked // _BLOCK_TOKENS)
        out[row, head] = by[:, asked] @ values[page, head, asked % _BLOCK_TOKENS].float()
    return out, lse


class _Order(NamedTuple):
    counted: torch.Tensor  # [B, H], number of tokens that count
    tokens: torch.Tensor  # [B, H, N * 32], indices of all tokens of a list, those that count first


def _counted_first(tokens: torch.Tensor, masks: torch.Tensor) -> _Order:
    bits = masks[..., None] >> torch.arange(_BLOCK_TOKENS) & 1
    counted = bits.flatten(2).bool() & (torch.arange(bits[0, 0].numel()) < tokens[..., None])
    return _Order(counted.sum(dim=2), counted.int().argsort(dim=2, descending=True, stable=True))


class TorchProvider(Provider):
    name: Literal["torch", "ipex"] = "torch"

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def kernel(self) -> Kernel:
        return flash_attention

    def start(self, regions: Regions, plan: ThreadPlan, placement: Placement, failed: Callable[[str], None]) -> Planned:
        self._regions, self._placement, self._failed = regions, placement, failed
        self._kernel = self.kernel()
        self._engine = Engine(regions, plan, Placement(threads=0, group_threads=1))
        self._thread = threading.Thread(target=self._run, name="hybrid-torch", daemon=True)
        self._thread.start()
        return Planned(
            provider=self.name,
            variant=self.name,
            threads=placement.threads,
            group_threads=placement.threads,  # all threads share every post
            cores=list(placement.cores),
        )

    def warm_up(self, cancelled: Callable[[], bool]) -> None:
        self._regions.mailbox.populate(1, cancelled)
        self._regions.pool.populate(self._placement.threads, cancelled)
        shape = self._regions.geometry
        keys, values = self._pools(layer=0)
        query = torch.zeros(1, shape.kv_heads, shape.group, shape.head_dim, dtype=_query_dtype(shape))
        one = torch.ones(1, shape.kv_heads, dtype=torch.long)
        attend(query, keys, values, torch.zeros_like(one)[:, :, None], one, one, 1.0, self._kernel)

    def stats(self) -> StatsReport:
        assert self._engine is not None
        return self._engine.stats()

    def drain(self, timeout_s: float) -> bool:
        assert self._engine is not None
        return self._engine.drain(timeout_s)

    def stop(self) -> None:
        if self._engine is not None and self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._engine.stop()
            self._engine = None

    def _run(self) -> None:
        assert self._engine is not None
        try:
            if self._placement.cores:
                # binds this thread and torch's threads, which it creates and which inherit the binding
                os.sched_setaffinity(0, self._placement.cores)
            torch.set_num_threads(self._placement.threads)
            with torch.inference_mode():
                while not self._stopping.is_set():
                    job = self._engine.take(_TAKE_US)
                    if job is not None:
                        out, lse = self._compute(job)
                        self._engine.answer(out.data_ptr(), lse.data_ptr())
        except Exception as error:  # without this thread no post is answered, so any error ends the worker
            log.debug("provider %s", self.name, exc_info=True)
            self._failed(f"provider {self.name} failed: {error}")

    def _compute(self, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._regions.geometry
        lists = (job.rows, shape.kv_heads)

        def numbers(pointer: object, *extents: int) -> torch.Tensor:
            address = ctypes.cast(pointer, ctypes.c_void_p).value  # type: ignore[arg-type]
            # page numbers fit an int32: a pool of 2^31 pages would take terabytes
            return _view(address, extents, torch.int32).long()

        keys, values = self._pools(job.layer)
        if job.kind == SUM_VALUES:
            weights = _view(job.weights, (*lists, shape.group, shape.max_blocks, _BLOCK_TOKENS), torch.float32)
            return sum_values(weights, values, numbers(job.pages, *lists, shape.max_blocks), numbers(job.count, *lists))
        query = _view(job.query, (*lists, shape.group, shape.head_dim), _query_dtype(shape))
        return attend(
            query,
            keys,
            values,
            numbers(job.pages, *lists, shape.max_blocks),
            numbers(job.count, *lists),
            numbers(job.last_fill, *lists),
            job.scale,
            self._kernel,
            numbers(job.masks, *lists, shape.max_blocks) if job.masks else None,
        )

    def _pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape, pool = self._regions.geometry, self._regions.pool.address
        extents = (shape.pages, shape.kv_heads, _BLOCK_TOKENS, shape.head_dim)
        first = pool + layer * shape.layer_stride
        dtype = torch.float8_e4m3fn if is_fp8(shape.dtype) else _query_dtype(shape)
        return _view(first + shape.keys, extents, dtype), _view(first + shape.values, extents, dtype)


def _query_dtype(shape: Geometry) -> torch.dtype:
    return _DTYPES[query_code(shape.dtype)]


def _view(address: int | None, extents: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over memory at ``address``. Torch must not write to the tensor: the pool is mapped read-only."""
    size = torch.Size(extents).numel()
    if not address or not size:
        return torch.empty(extents, dtype=dtype)
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(extents)
