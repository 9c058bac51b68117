"""The structs of ``kernels/cuda/include/sglang_hybrid/cuda/lanes_api.h`` as ctypes sees them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_uint32, c_uint64, c_void_p

from sglang_hybrid.cuda.structs import Side


class UnitRms(ctypes.Structure):
    _fields_ = (
        ("hidden", c_void_p),
        ("residual", c_void_p),
        ("gain", c_void_p),
        ("unit", c_void_p),
        ("normed", c_void_p),
        ("active_rows", c_void_p),
        ("hidden_stride", c_uint64),
        ("residual_stride", c_uint64),
        ("eps", c_float),
        ("batch", c_uint32),
        ("width", c_uint32),
        ("dtype", c_uint32),
    )


class FinishQueries(ctypes.Structure):
    _fields_ = (
        ("projected", c_void_p),
        ("addend", c_void_p),
        ("bias", c_void_p),
        ("gain", c_void_p),
        ("rotary", c_void_p),
        ("positions", c_void_p),
        ("out", c_void_p),
        ("active_rows", c_void_p),
        ("rotary_rows", c_uint64),
        ("eps", c_float),
        ("batch", c_uint32),
        ("heads", c_uint32),
        ("head_dim", c_uint32),
        ("rotary_dim", c_uint32),
        ("rotary_dtype", c_uint32),
        ("neox", c_uint32),
        ("dtype", c_uint32),
    )


class AttendMissed(ctypes.Structure):
    _fields_ = (
        ("query", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("pages", c_void_p),
        ("counts", c_void_p),
        ("served", c_void_p),
        ("active_rows", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("scale", c_float),
        ("batch", c_uint32),
        ("kv_heads", c_uint32),
        ("group", c_uint32),
        ("head_dim", c_uint32),
        ("dtype", c_uint32),
        ("most_misses", c_uint32),
        ("pool_pages", c_uint32),
    )


class FinishLate(ctypes.Structure):
    _fields_ = (("missed", AttendMissed), ("local", Side), ("out", c_void_p))


BY_NAME: dict[str, type[ctypes.Structure]] = {
    "sh_unit_rms": UnitRms,
    "sh_finish_queries": FinishQueries,
    "sh_attend_missed": AttendMissed,
    "sh_finish_late": FinishLate,
}
