"""The structs of ``kernels/cuda/include/sglang_hybrid/cuda/dense_api.h`` as ctypes sees them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_uint32, c_void_p

from sglang_hybrid.cuda.selection_structs import DenseTable, Step


class BeginStep(ctypes.Structure):
    _fields_ = (
        ("req_to_token", c_void_p),
        ("rows", c_void_p),
        ("lengths", c_void_p),
        ("page_table", c_void_p),
        ("step_lengths", c_void_p),
        ("row_of", c_void_p),
        ("begins", c_void_p),
        ("active_rows", c_void_p),
        ("lengths_by_row", c_void_p),
        ("first_lengths", c_void_p),
        ("row_tokens", c_uint32),
        ("rows_known", c_uint32),
        ("batch", c_uint32),
        ("max_blocks", c_uint32),
        ("active", c_uint32),
        ("wide", c_uint32),
    )


class HoldRows(ctypes.Structure):
    _fields_ = (
        ("table", DenseTable),
        ("step", Step),
        ("renewed", c_void_p),
        ("free_pages", c_void_p),
        ("free_count", c_void_p),
        ("load_pages", c_void_p),
        ("load_destinations", c_void_p),
        ("load_count", c_void_p),
        ("refused", c_void_p),
        ("capacity", c_uint32),
        ("kv_heads", c_uint32),
    )


class AttendPages(ctypes.Structure):
    _fields_ = (
        ("query", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("table", DenseTable),
        ("step", Step),
        ("out", c_void_p),
        ("partial_out", c_void_p),
        ("partial_lse", c_void_p),
        ("arrived", c_void_p),
        ("scale", c_float),
        ("kv_heads", c_uint32),
        ("group", c_uint32),
        ("head_dim", c_uint32),
        ("dtype", c_uint32),
        ("units", c_uint32),
        ("overlaps", c_uint32),
        ("unused", c_uint32),
    )


BY_NAME: dict[str, type[ctypes.Structure]] = {
    "sh_begin_step": BeginStep,
    "sh_hold_rows": HoldRows,
    "sh_attend_pages": AttendPages,
}
