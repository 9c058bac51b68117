"""The structs of ``kernels/cuda/include/sglang_hybrid/cuda/prefill_api.h`` as ctypes sees them."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64, c_void_p


class PlaceTokens(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_slots", c_void_p),
        ("value_slots", c_void_p),
        ("places", c_void_p),
        ("refused", c_void_p),
        ("key_stride", c_uint64),
        ("value_stride", c_uint64),
        ("most_places", c_uint64),
        ("tokens", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("unused", c_uint32),
    )


class ScatterBlocks(ctypes.Structure):
    _fields_ = (
        ("key_slots", c_void_p),
        ("value_slots", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("pages", c_void_p),
        ("refused", c_void_p),
        ("capacity", c_uint32),
        ("pool_pages", c_uint32),
        ("kv_heads", c_uint32),
        ("slots", c_uint32),
        ("block_bytes", c_uint32),
        ("ctas", c_uint32),
    )


class CopyRuns(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_slots", c_void_p),
        ("value_slots", c_void_p),
        ("runs", c_void_p),
        ("page_bytes", c_uint64),
        ("count", c_uint32),
        ("pool_pages", c_uint32),
        ("staged_pages", c_uint32),
        ("to_pool", c_uint32),
    )


BY_NAME: dict[str, type[ctypes.Structure]] = {
    "sh_place_tokens": PlaceTokens,
    "sh_scatter_blocks": ScatterBlocks,
    "sh_copy_runs": CopyRuns,
}
