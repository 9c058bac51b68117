"""Stand-in for ``sgl_kernel`` on a host without a GPU.

SGLang's CPU engine computes in plain torch when its compiled CPU kernels are absent
(it looks for the operator ``convert_weight_packed``, which we therefore leave
undefined), and then calls only the few bookkeeping functions below. Every other name
can be imported, as SGLang does at module level, and raises when it is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} exists only as a compiled kernel and this host has none: "
            "install sglang-kernel on a GPU host, or leave out the feature that called it"
        )

    return missing


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    _row_stride: int,
) -> None:
    """Write the next ``end - start`` of ``slots`` to ``req_to_token[row, start:end]``, row by row."""
    spans = zip(rows.tolist(), start.tolist(), end.tolist(), slots.split((end - start).tolist()), strict=True)
    for row, first, last, chunk in spans:
        req_to_token[row, first:last] = chunk.to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    _row_stride: int,
) -> None:
    """Collect ``req_to_token[row, start:end]`` of all rows into ``slots``, one row after the other."""
    spans = zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)
    found = [req_to_token[row, first:last] for row, first, last in spans]
    if found:
        joined = torch.cat(found)
        slots[: joined.numel()] = joined.to(slots.dtype)


def _multiply32(a: torch.Tensor, constant: int) -> torch.Tensor:
    """Return the 32-bit wrapping product, computed in two halves because int64 cannot hold the full product."""
    low, high = a & 0xFFFF, a >> 16
    return (low * constant + ((high * constant & 0xFFFF) << 16)) & 0xFFFFFFFF


def _rotate32(a: torch.Tensor, bits: int) -> torch.Tensor:
    return ((a << bits) | (a >> (32 - bits))) & 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3 (x86, 32 bit) of the words seed low, seed high, position, column, for seeded sampling."""
    seed = seed.to(torch.int64)[:, None]
    words = (
        seed & 0xFFFFFFFF,
        (seed >> 32) & 0xFFFFFFFF,
        positions.to(torch.int64)[:, None] & 0xFFFFFFFF,
        columns.to(torch.int64)[None, :] & 0xFFFFFFFF,
    )
    h = torch.zeros_like(seed)
    for word in words:
        k = _multiply32(_rotate32(_multiply32(word, 0xCC9E2D51), 15), 0x1B873593)
        h = (_multiply32(_rotate32(h ^ k, 13), 5) + 0xE6546B64) & 0xFFFFFFFF
    h = h ^ 16  # length of the key in bytes
    h = _multiply32(h ^ (h >> 16), 0x85EBCA6B)
    h = _multiply32(h ^ (h >> 13), 0xC2B2AE35)
    return (h ^ (h >> 16)).to(torch.uint32)


def _init_cpu_threads_env(_cpu_ids: Any) -> str:
    return "threads are left to OpenMP"


def _initialize(_tp_size: int, _tp_rank: int) -> None:
    # SGLang reads LOCAL_SIZE as "a shared-memory all-reduce is available"; without it, it uses gloo.
    os.environ.pop("LOCAL_SIZE", None)


murmur_hash32.default = murmur_hash32  # type: ignore[attr-defined]  # SGLang calls the overload by name

_ops: Any = torch.ops.sgl_kernel
_ops.init_cpu_threads_env = _init_cpu_threads_env
_ops.initialize = _initialize
_ops.murmur_hash32_cpu = murmur_hash32
