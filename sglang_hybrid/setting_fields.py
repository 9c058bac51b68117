"""Readers for the fields of typed settings: defaults, descriptions, and legal values in words.

A setting is a field of a frozen ``msgspec.Struct``, annotated with a description::

    interval: Annotated[int, Meta(ge=0, description="Decode steps between two recalls.")] = 8

The functions here read such fields. The legal values follow from the type, or from ``Meta(extra={"legal": "..."})``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect as types
from msgspec.structs import FieldInfo


@functools.cache  # the lookup takes milliseconds
def fields_of(settings: type[msgspec.Struct]) -> Mapping[str, FieldInfo]:
    """Return the fields of ``settings`` by name, in the order of their definition."""
    return {field.name: field for field in msgspec.structs.fields(settings)}


def default_of(field: FieldInfo) -> Any:
    """Return the default value of a field. The field must have a default."""
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def description_of(field: FieldInfo) -> str:
    """Return the description of a field, or an empty string if the field has none."""
    kind = types.type_info(field.type)
    return (kind.extra_json_schema or {}).get("description", "") if isinstance(kind, types.Metadata) else ""


def legal_values_of(field: FieldInfo) -> str:
    """Return the legal values of a field, in words."""
    return legal_values(types.type_info(field.type))


def legal_values(kind: types.Type) -> str:
    """Return the legal values of a type, in words. Raise TypeError for a type that no setting has."""
    match kind:
        case types.Metadata(type=inner, extra=extra):
            return str(extra["legal"]) if extra and "legal" in extra else legal_values(inner)
        case types.UnionType(types=members):
            return " or ".join(map(legal_values, members))
        case types.LiteralType(values=values):
            return ("one of " if len(values) > 1 else "") + ", ".join(map(str, values))
        case types.IntType() | types.FloatType():
            bounds = {">": kind.gt, ">=": kind.ge, "<": kind.lt, "<=": kind.le}
            limits = [f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None]
            name = "a whole number" if isinstance(kind, types.IntType) else "a number"
            return f"{name} {' and '.join(limits)}".rstrip()
        case types.BoolType():
            return "true or false"
        case types.StrType():
            return "text"
        case types.NoneType():
            return "null"
    raise TypeError(f"a setting has a type without a description in words: {kind}")
