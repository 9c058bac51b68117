"""The structs that Python reads from the headers of the CUDA kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from sglang_hybrid.ops.cpu.structs import Geometry
from sglang_hybrid.ops.cuda.structs import OUTCOMES, STRUCTS, struct


def types_of_fields(struct_type: type[ctypes.Structure]) -> dict[str, Any]:
    return {field[0]: field[1] for field in struct_type._fields_}


def test_fields_have_the_types_and_places_that_a_compiler_gives_them() -> None:
    merge, side = STRUCTS["sh_merge"], STRUCTS["sh_side"]
    assert [(name, getattr(merge, name).offset) for name in types_of_fields(merge)] == [
        ("first", 0), ("second", 16), ("out", 32), ("lse", 40), ("active_rows", 48), ("batch", 56), ("heads", 60),
        ("head_dim", 64), ("dtype", 68),
    ]  # fmt: skip
    assert types_of_fields(merge)["first"] is side and ctypes.sizeof(side) == 16
    post = types_of_fields(STRUCTS["sh_mailbox_post"])
    assert post["geometry"] is Geometry and post["scale"] is ctypes.c_float and post["state"] is ctypes.c_void_p


def test_outcomes_are_those_of_the_counters() -> None:
    assert OUTCOMES == ("served", "empty", "late", "damaged", "refused", "withheld")
    assert types_of_fields(STRUCTS["sh_mailbox_state"])["outcomes"]._length_ == len(OUTCOMES)


def test_a_field_that_is_unknown_or_forgotten_is_refused() -> None:
    with pytest.raises(TypeError, match="sh_slot_table has no row"):
        struct("slot_table", row=3)
    with pytest.raises(TypeError, match="sh_slot_table needs recent, rows, sink"):
        struct("slot_table", slots=3)
    assert struct("slot_table", rows=1, slots=2, sink=3, recent=4).recent == 4  # pointers may be left out, and are null
    assert not struct("slot_table").slots
