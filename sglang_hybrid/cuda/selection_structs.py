"""The structs of ``kernels/cuda/include/sglang_hybrid/cuda/selection_api.h`` as ctypes sees them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_uint32, c_uint64, c_void_p


class Digests(ctypes.Structure):
    _fields_ = (
        ("digests", c_void_p),
        ("codes", c_void_p),
        ("channels", c_void_p),
        ("pages", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("channel_count", c_uint32),
        ("dtype", c_uint32),
        ("compact", c_uint32),
    )


class SlotTable(ctypes.Structure):
    _fields_ = (
        ("positions", c_void_p),
        ("rows", c_uint32),
        ("slots", c_uint32),
        ("sink", c_uint32),
        ("recent", c_uint32),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("page_table", c_void_p),
        ("lengths", c_void_p),
        ("row_of", c_void_p),
        ("active_rows", c_void_p),
        ("batch", c_uint32),
        ("max_blocks", c_uint32),
    )


class DenseTable(ctypes.Structure):
    _fields_ = (
        ("pages", c_void_p),
        ("held", c_void_p),
        ("rows", c_uint32),
        ("max_blocks", c_uint32),
        ("device_pages", c_uint32),
        ("unused", c_uint32),
    )


class Append(ctypes.Structure):
    _fields_ = (
        ("digests", Digests),
        ("table", SlotTable),
        ("dense", DenseTable),
        ("step", Step),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_stride", c_uint64),
        ("value_stride", c_uint64),
        ("key_slots", c_void_p),
        ("value_slots", c_void_p),
        ("pool_keys", c_void_p),
        ("pool_values", c_void_p),
        ("scores", c_void_p),
        ("refused", c_void_p),
        ("scores_by_row", c_uint32),
        ("overlaps", c_uint32),
    )


class DigestPages(ctypes.Structure):
    _fields_ = (
        ("digests", Digests),
        ("keys", c_void_p),
        ("pages", c_void_p),
        ("filled", c_void_p),
        ("page_stride", c_uint64),
        ("head_stride", c_uint64),
        ("token_stride", c_uint64),
        ("count", c_uint32),
        ("unused", c_uint32),
    )


class ScoreBlocks(ctypes.Structure):
    _fields_ = (
        ("digests", Digests),
        ("step", Step),
        ("query", c_void_p),
        ("estimates", c_void_p),
        ("scores", c_void_p),
        ("due", c_void_p),
        ("first_lengths", c_void_p),
        ("hot", c_void_p),
        ("hot_shares", c_void_p),
        ("scale", c_float),
        ("spread", c_float),
        ("group", c_uint32),
        ("interval", c_uint32),
        ("layer", c_uint32),
        ("by_row", c_uint32),
        ("most_hot", c_uint32),
        ("unused", c_uint32),
    )


class Plan(ctypes.Structure):
    _fields_ = (
        ("pages", c_void_p),
        ("destinations", c_void_p),
        ("positions", c_void_p),
        ("count", c_void_p),
        ("progress", c_void_p),
        ("capacity", c_uint64),
    )


class SelectBlocks(ctypes.Structure):
    _fields_ = (
        ("table", SlotTable),
        ("step", Step),
        ("scored", ScoreBlocks),
        ("scores", c_void_p),
        ("miss_pages", c_void_p),
        ("miss_positions", c_void_p),
        ("miss_counts", c_void_p),
        ("gather_share", c_void_p),
        ("gathered", Plan),
        ("totals", c_void_p),
        ("due", c_void_p),
        ("interval", c_void_p),
        ("first_lengths", c_void_p),
        ("plan", Plan),
        ("bonus", c_float),
        ("worth", c_float),
        ("kv_heads", c_uint32),
        ("budget", c_uint32),
        ("most_misses", c_uint32),
        ("layer", c_uint32),
        ("pool_pages", c_uint32),
        ("most_gathered", c_uint32),
        ("scores_by_row", c_uint32),
        ("any_block", c_uint32),
    )


class ApplyPlan(ctypes.Structure):
    _fields_ = (
        ("plan", Plan),
        ("positions", c_void_p),
        ("slots", c_uint64),
    )


class ShiftLse(ctypes.Structure):
    _fields_ = (
        ("digests", Digests),
        ("query", c_void_p),
        ("query_ahead", c_void_p),
        ("pages", c_void_p),
        ("counts", c_void_p),
        ("active_rows", c_void_p),
        ("lse", c_void_p),
        ("scale", c_float),
        ("batch", c_uint32),
        ("group", c_uint32),
        ("most_misses", c_uint32),
    )


BY_NAME: dict[str, type[ctypes.Structure]] = {
    "sh_append": Append,
    "sh_digest_pages": DigestPages,
    "sh_score_blocks": ScoreBlocks,
    "sh_select_blocks": SelectBlocks,
    "sh_apply_plan": ApplyPlan,
    "sh_shift_lse": ShiftLse,
}
