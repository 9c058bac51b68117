"""Structs and constants of ``kernels/cpu/include/sglang_hybrid`` for ctypes. They must match the headers."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int64, c_uint32, c_uint64, c_void_p

DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}  # DType of block_attention.h, for a pool and its queries
FP8_POOL = "float8_e4m3fn"  # a pool whose queries have one of the dtypes above
_FIRST_FP8 = 3  # DType::fp8_bf16; then follows FP8 with queries of the other dtypes, in the order of DTYPES
MASKS, VALUE_SUMS = 1, 2  # mailbox.h: geometry_masks, geometry_value_sums; bits of Geometry.flags
SUM_VALUES = 2  # mailbox.h: PostKind::sum_values
MAILBOX_VERSION = 4  # mailbox.h: mailbox_version


def dtype_code(pool: str, query: str) -> int:
    """Return the kernels' DType for a pool and the queries that attend to it. Raise KeyError if there is none.

    Unless the pool is FP8, queries of another dtype are rounded to the pool's dtype.
    """
    return _FIRST_FP8 + DTYPES[query] if pool == FP8_POOL else DTYPES[pool]


def is_fp8(code: int) -> bool:
    return code >= _FIRST_FP8


def query_code(code: int) -> int:
    """Return the DType of queries for a DType of pool and queries."""
    return code - _FIRST_FP8 if is_fp8(code) else code


def pool_itemsize(code: int) -> int:
    """Return the bytes of one number of the pool."""
    return 1 if is_fp8(code) else query_itemsize(code)


def query_itemsize(code: int) -> int:
    return 4 if query_code(code) == DTYPES["float32"] else 2


class BlockAttention(ctypes.Structure):
    """BlockAttention of block_attention.h."""

    _fields_ = (
        ("query", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("page_stride", c_uint64),
        ("pages", POINTER(c_uint32)),
        ("masks", POINTER(c_uint32)),
        ("count", c_uint32),
        ("last_fill", c_uint32),
        ("group", c_uint32),
        ("head_dim", c_uint32),
        ("dtype", c_uint32),
        ("scale", c_float),
        ("out", POINTER(c_float)),
        ("lse", POINTER(c_float)),
        ("next", c_void_p),
    )


class Geometry(ctypes.Structure):
    """Geometry of mailbox.h: the shapes that client and worker must agree on."""

    _fields_ = (
        ("rows", c_uint32),
        ("kv_heads", c_uint32),
        ("group", c_uint32),
        ("head_dim", c_uint32),
        ("dtype", c_uint32),
        ("max_blocks", c_uint32),
        ("layers", c_uint32),
        ("pages", c_uint32),
        ("keys", c_uint64),
        ("values", c_uint64),
        ("layer_stride", c_uint64),
        ("pool_bytes", c_uint64),
        ("flags", c_uint64),
    )


class MailboxLayout(ctypes.Structure):
    """MailboxLayout of mailbox.h: offsets in bytes from the mailbox's start."""

    _fields_ = tuple(
        (name, c_uint64)
        for name in (
            "bell", "worker", "client", "posts", "requests", "replies", "checks", "lists", "pages", "masks",
            "queries", "weights", "outputs", "lses", "bytes",
        )
    )  # fmt: skip


class Lists(ctypes.Structure):
    """sh_lists of c_api.h."""

    _fields_ = (
        ("query", c_void_p),
        ("pages", c_void_p),
        ("fill", c_void_p),
        ("masks", c_void_p),
        ("weights", c_void_p),
        ("rows", c_uint32),
        ("listed", c_uint32),
        ("layer", c_uint32),
        ("scale", c_float),
    )


class HostLayer(ctypes.Structure):
    """sh_host_layer of c_api.h."""

    _fields_ = (("digests", c_void_p), ("codes", c_void_p), ("channels", POINTER(c_int64)))


class HostOptions(ctypes.Structure):
    """sh_host_options of c_api.h."""

    _fields_ = (
        ("threads", c_uint32),
        ("budget_blocks", c_uint32),
        ("sink_blocks", c_uint32),
        ("recent_blocks", c_uint32),
        ("channels", c_uint32),
        ("spread", c_float),
        ("openmp", c_void_p),
    )


class Rows(ctypes.Structure):
    """sh_rows of c_api.h."""

    _fields_ = (("data", c_void_p), ("stride", c_uint64))


class EngineOptions(ctypes.Structure):
    """sh_engine_options of c_api.h."""

    _fields_ = (
        ("threads", c_uint32),
        ("group_threads", c_uint32),
        ("task_blocks", c_uint32),
        ("spin_us", c_uint32),
        ("cores", POINTER(ctypes.c_int32)),
        ("variant", c_char_p),
    )


class EngineStats(ctypes.Structure):
    """sh_engine_stats of c_api.h."""

    _fields_ = tuple(
        (name, c_uint64)
        for name in (
            "posts", "rows", "refused_rows", "abandoned_posts", "blocks", "stolen_tasks", "busy_ns", "parks", "tasks",
        )
    )  # fmt: skip


class Job(ctypes.Structure):
    """sh_job of c_api.h."""

    _fields_ = (
        ("sequence", c_uint64),
        ("layer", c_uint32),
        ("rows", c_uint32),
        ("scale", c_float),
        ("kind", c_uint32),
        ("query", c_void_p),
        ("count", POINTER(c_uint32)),
        ("last_fill", POINTER(c_uint32)),
        ("pages", POINTER(c_uint32)),
        ("masks", POINTER(c_uint32)),
        ("weights", c_void_p),
    )


class Field(ctypes.Structure):
    """sh_field of c_api.h: one field of a mailbox record."""

    _fields_ = (("record", c_char_p), ("name", c_char_p), ("offset", c_uint32), ("bytes", c_uint32))
