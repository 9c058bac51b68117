"""The structs of ``kernels/cuda/include/sglang_hybrid/cuda/c_api.h`` as ctypes sees them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_uint32, c_uint64, c_void_p

from sglang_hybrid.native.structs import Geometry, MailboxLayout

OUTCOMES = ("served", "empty", "late", "damaged", "refused", "withheld")  # sh_mailbox_outcome


class AttendSlots(ctypes.Structure):
    _fields_ = (
        ("query", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("positions", c_void_p),
        ("row_of", c_void_p),
        ("lengths", c_void_p),
        ("active_rows", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("partial_out", c_void_p),
        ("partial_lse", c_void_p),
        ("arrived", c_void_p),
        ("scale", c_float),
        ("rows", c_uint32),
        ("batch", c_uint32),
        ("kv_heads", c_uint32),
        ("group", c_uint32),
        ("head_dim", c_uint32),
        ("dtype", c_uint32),
        ("units", c_uint32),
        ("slots", c_uint32),
        ("unused", c_uint32),
    )


class Side(ctypes.Structure):
    _fields_ = (("out", c_void_p), ("lse", c_void_p))


class Merge(ctypes.Structure):
    _fields_ = (
        ("first", Side),
        ("second", Side),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("active_rows", c_void_p),
        ("batch", c_uint32),
        ("heads", c_uint32),
        ("head_dim", c_uint32),
        ("dtype", c_uint32),
    )


class GatherBlocks(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_slots", c_void_p),
        ("value_slots", c_void_p),
        ("pages", c_void_p),
        ("destinations", c_void_p),
        ("count", c_void_p),
        ("refused", c_void_p),
        ("destination_slots", c_uint64),
        ("per_count", c_uint32),
        ("capacity", c_uint32),
        ("pool_pages", c_uint32),
        ("kv_heads", c_uint32),
        ("slots", c_uint32),
        ("block_bytes", c_uint32),
        ("ctas", c_uint32),
    )


class MailboxState(ctypes.Structure):
    """Lives in device memory; Python reads copies of it."""

    _fields_ = (
        ("mailbox", c_uint64),
        ("sequence", c_uint64),
        ("late", c_uint64),
        ("generation", c_uint32),
        ("withheld", c_uint32),
        ("finished", c_uint32),
        ("unused", c_uint32),
        ("outcomes", c_uint64 * len(OUTCOMES)),
    )


class Receipt(ctypes.Structure):
    """Lives in device memory, followed by ``1 + KV heads`` words for every batch entry."""

    _fields_ = (("sequence", c_uint64), ("generation", c_uint32), ("rows", c_uint32))


class MailboxPost(ctypes.Structure):
    _fields_ = (
        ("state", c_void_p),
        ("receipt", c_void_p),
        ("query", c_void_p),
        ("pages", c_void_p),
        ("counts", c_void_p),
        ("last_fill", c_void_p),
        ("active_rows", c_void_p),
        ("geometry", Geometry),
        ("layout", MailboxLayout),
        ("batch", c_uint32),
        ("listed", c_uint32),
        ("layer", c_uint32),
        ("begins_step", c_uint32),
        ("scale", c_float),
        ("unused", c_uint32),
    )


class MailboxWait(ctypes.Structure):
    _fields_ = (
        ("state", c_void_p),
        ("receipt", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("served", c_void_p),
        ("deadline_ns", c_uint64),
        ("geometry", Geometry),
        ("layout", MailboxLayout),
        ("batch", c_uint32),
        ("unused", c_uint32),
    )


BY_NAME: dict[str, type[ctypes.Structure]] = {
    "sh_attend_slots": AttendSlots,
    "sh_merge": Merge,
    "sh_gather_blocks": GatherBlocks,
    "sh_mailbox_state": MailboxState,
    "sh_receipt": Receipt,
    "sh_mailbox_post": MailboxPost,
    "sh_mailbox_wait": MailboxWait,
}
