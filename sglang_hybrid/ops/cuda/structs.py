"""Structs of launch arguments, read from the C++ headers, so that no field can differ in name, type or offset.

The headers keep to a small part of C++: structs of pointers, numbers, arrays of numbers and other structs, and enums.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import c_float, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any

from sglang_hybrid.ops.cpu.structs import Geometry, MailboxLayout
from sglang_hybrid.ops.cuda.sources import INCLUDES

# each header after the headers whose structs it uses
_HEADERS = (
    "c_api.h", "selection_api.h", "dense_api.h", "lanes_api.h", "prefill_api.h", "salience_api.h", "speculation_api.h",
    "weights_api.h", "kept_tokens_api.h",
)  # fmt: skip
_NUMBERS = {"float": c_float, "int32_t": c_int32, "uint32_t": c_uint32, "uint64_t": c_uint64}
_SHARED = {"sglang_hybrid::Geometry": Geometry, "sglang_hybrid::MailboxLayout": MailboxLayout}
_UNUSED = "unused"  # name of padding fields

_COMMENT = re.compile(r"//.*")
_DEFINITION = re.compile(r"\b(struct|enum) (sh_\w+)(?: : \w+)? \{(.*?)\};", re.S)
_FIELD = re.compile(r"(?:const )?([\w:]+)(\*?)\s+(\w+)(?:\[(\w+)\])?")


class KernelStruct(ctypes.Structure):
    """Base class of the headers' structs. Without arguments, all fields are 0.

    With arguments, all number fields must be given by name; other fields that are not given are null or 0. Raises
    TypeError for unknown and for missing fields.
    """

    _numbers: frozenset[str]  # names of the number fields

    def __init__(self, **fields: Any) -> None:
        known = {name for name, _type in self._fields_}  # type: ignore[misc]
        if unknown := fields.keys() - known:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        if fields and (missing := self._numbers - fields.keys()):
            raise TypeError(f"{type(self).__name__} needs {', '.join(sorted(missing))}")
        super().__init__(**fields)


def _make(name: str, body: str, made: dict[str, type[KernelStruct]], values: dict[str, int]) -> type[KernelStruct]:
    fields: list[tuple[str, Any]] = []
    for line in filter(None, map(str.strip, body.split(";"))):
        match = _FIELD.fullmatch(line)
        if match is None:
            raise ValueError(f"{name}: {line!r} is no field that this module can read")
        kind, pointer, field, length = match.groups()
        known: Any = c_void_p if pointer else (_NUMBERS | _SHARED | made)[kind]
        fields.append((field, known * values[length] if length else known))
    numbers = frozenset(field for field, kind in fields if kind in _NUMBERS.values()) - {_UNUSED}
    return type(name, (KernelStruct,), {"_fields_": fields, "_numbers": numbers})


def _read_headers() -> tuple[dict[str, type[KernelStruct]], dict[str, int]]:
    made: dict[str, type[KernelStruct]] = {}
    values: dict[str, int] = {}
    for header in _HEADERS:
        text = _COMMENT.sub("", (INCLUDES[0] / "sglang_hybrid" / "cuda" / header).read_text())
        for kind, name, body in _DEFINITION.findall(text):
            if kind == "enum":
                values |= {entry: int(number) for entry, number in re.findall(r"(\w+) = (-?\d+)", body)}
            else:
                made[name] = _make(name, body, made, values)
    return made, values


STRUCTS, _VALUES = _read_headers()


def _names(prefix: str, count: int) -> tuple[str, ...]:
    """Return the first ``count`` names of an enum without their prefix, in the order of their numbers."""
    numbers = {_VALUES[name]: name.removeprefix(prefix) for name in _VALUES if name.startswith(prefix)}
    return tuple(numbers[number] for number in range(count))


# Possible outcomes of a posted row, in the order of the counters of sh_mailbox_state.
OUTCOMES = _names("sh_row_", _VALUES["sh_row_outcomes"])
# Numbers that selections and gathers count, in the order of sh_select_blocks.totals.
TOTALS = _names("sh_total_", _VALUES["sh_select_totals"])
# Upper bounds in seconds of all buckets of sh_mailbox_state.waits except the last one, which has no upper bound.
WAIT_BOUNDS = tuple(_VALUES["sh_wait_first_ns"] * 2**number / 1e9 for number in range(_VALUES["sh_wait_buckets"] - 1))


def struct(name: str, **fields: Any) -> KernelStruct:
    """Return ``sh_<name>`` of the headers with these fields."""
    return STRUCTS[f"sh_{name}"](**fields)
