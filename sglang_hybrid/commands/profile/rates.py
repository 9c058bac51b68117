"""Measures this host's rates: reading memory, block attention, and copies over PCIe if there is a GPU."""

from __future__ import annotations

import os
import time

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cpu import library
from sglang_hybrid.ops.cpu.dtypes import code_of
from sglang_hybrid.ops.cpu.lists import HostLists
from sglang_hybrid.ops.cpu.local import LocalAttention
from sglang_hybrid.ops.cpu.structs import Geometry
from sglang_hybrid.origin import cpu_name
from sglang_hybrid.policies.scout.profile import HostRates
from sglang_hybrid.protocol.region import SharedRegion

_POOL_BYTES = 512 << 20
_BLOCKS = 8  # per list, as in a server's lists of misses
_ROWS = 64
_SECONDS = 1.0


def measure_rates(kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, model: torch.dtype) -> HostRates:
    """Measure with blocks of the model's shape and of ``dtype``, at random places. This takes a few seconds."""
    threads = len(os.sched_getaffinity(0))
    block_bytes = BLOCK_TOKENS * head_dim * dtype.itemsize
    pages = _POOL_BYTES // (2 * kv_heads * block_bytes)
    shape = (pages, kv_heads, BLOCK_TOKENS, head_dim)
    region = SharedRegion(SharedRegion.size_for(*[pages * kv_heads * block_bytes] * 2), name="sglang-hybrid-rates")
    keys, values = (region.take(shape, dtype) for _ in range(2))
    for pool in (keys, values):
        pool.fill_(0.5)
    read = float(library().sh_read_bandwidth(region.address, region.size, threads, None)) / 1e9
    geometry = Geometry(
        rows=_ROWS, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=code_of(dtype, model),
        max_blocks=_BLOCKS, layers=1, pages=pages, keys=keys.data_ptr() - region.address,
        values=values.data_ptr() - region.address, layer_stride=values.data_ptr() - keys.data_ptr(),
        pool_bytes=region.size,
    )  # fmt: skip
    attention = _attention_rate(LocalAttention(region.address, geometry, _BLOCKS, threads), geometry, dtype)
    transfer = transfer_rate(keys) if torch.cuda.is_available() else None
    return HostRates(
        cpu=cpu_name(), threads=threads, read_gb_s=round(read, 1), attention_gb_s=round(attention, 1),
        transfer_gb_s=None if transfer is None else round(transfer, 1),
    )  # fmt: skip


def _attention_rate(local: LocalAttention, geometry: Geometry, dtype: torch.dtype) -> float:
    size = (_ROWS, geometry.kv_heads, _BLOCKS)
    query = torch.rand(_ROWS, geometry.kv_heads * geometry.group, geometry.head_dim)
    read_bytes, spent = 0, 0.0
    while spent < _SECONDS:
        ids = torch.randint(0, geometry.pages, size)
        lists = HostLists(query, ids, torch.full(size, 32), 0, geometry.head_dim**-0.5, local.query_dtype)
        started = time.perf_counter()
        local.attend(lists)
        spent += time.perf_counter() - started
        read_bytes += 2 * ids.numel() * 32 * geometry.head_dim * dtype.itemsize
    return read_bytes / spent / 1e9


def transfer_rate(source: torch.Tensor) -> float:
    """Return the GB/s of a copy of half of ``source``, pinned, to the GPU. This is an upper bound for the gather."""
    pinned = source[: len(source) // 2].contiguous().pin_memory()
    target = torch.empty_like(pinned, device="cuda")
    target.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    target.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    return pinned.numel() * pinned.element_size() / (time.perf_counter() - started) / 1e9
