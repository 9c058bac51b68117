"""Conversion between torch's dtypes and the library's codes. One code names the dtypes of a pool and of its queries."""

from __future__ import annotations

import torch

from sglang_hybrid.ops.cpu.library import NativeError
from sglang_hybrid.ops.cpu.structs import DTYPES, FP8_POOL, Geometry, dtype_code, query_code

_QUERIES = {code: getattr(torch, name) for name, code in DTYPES.items()}


def code_of(pool: torch.dtype, query: torch.dtype) -> int:
    """Return ``Geometry.dtype`` of a pool for a model of dtype ``query``. Raise NativeError if no kernel reads them."""
    names = [str(dtype).removeprefix("torch.") for dtype in (pool, query)]
    try:
        return dtype_code(*names)
    except KeyError:
        raise NativeError(
            f"a KV cache of {names[0]} for a model in {names[1]} cannot be read by the CPU kernels: use "
            f"{', '.join(DTYPES)}, or {FP8_POOL} for a model in one of these"
        ) from None


def query_dtype(geometry: Geometry) -> torch.dtype:
    """Return the dtype that queries must have when the library reads them from memory."""
    dtype: torch.dtype = _QUERIES[query_code(geometry.dtype)]
    return dtype
