"""All environment variables of the package, as typed objects.

Values are read when ``get()`` is called, never at import: a launcher may set a
variable after this module was loaded and before it starts a child process.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """Settings that cannot be used. Each argument of the exception describes one problem in one line."""

    @property
    def problems(self) -> tuple[str, ...]:
        return self.args

    def __str__(self) -> str:
        return "\n".join(self.args)


@dataclass(frozen=True)
class EnvType(Generic[T]):
    """Conversion of a variable's text to a value. ``parse`` raises ValueError for text that is not ``legal``."""

    legal: str
    parse: Callable[[str], T]


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    name: str
    type: EnvType[T]
    default: T
    doc: str

    def get(self) -> T:
        """Return the current value, or the default of an unset or empty variable. Raise ConfigError for illegal text.

        An empty variable counts as unset, because container files can empty a variable but not remove it.
        """
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.type.parse(text)
        except ValueError as error:
            raise ConfigError(f"environment variable {self.name}={text!r}: must be {self.type.legal}") from error


_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _parse_bool(text: str) -> bool:
    value = _BOOLS.get(text.strip().lower())
    if value is None:
        raise ValueError(text)
    return value


def _parse_strings(text: str) -> tuple[str, ...]:
    items = json.loads(text)
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(text)
    return tuple(items)


def _parse_task_blocks(text: str) -> int:
    if not 1 <= (blocks := int(text)) <= 4096:
        raise ValueError(text)
    return blocks


TEXT = EnvType[str | None]("text", str)
BOOL = EnvType[bool](f"one of {', '.join(_BOOLS)}", _parse_bool)
PATH = EnvType[Path | None]("a path", Path)
BYTES = EnvType[int | None]("a number of bytes", int)
TASK_BLOCKS = EnvType[int]("a whole number from 1 to 4096", _parse_task_blocks)
STRINGS = EnvType[tuple[str, ...]]('a JSON list of strings such as ["key=value"]', _parse_strings)

CONFIG = EnvVar("SGLANG_HYBRID_CONFIG", PATH, None, "YAML file with settings; --hybrid-config sets it")
SET = EnvVar("SGLANG_HYBRID_SET", STRINGS, (), "single settings; --hybrid appends to it")
ALLOW_UNTESTED_SGLANG = EnvVar("SGLANG_HYBRID_ALLOW_UNTESTED_SGLANG", BOOL, False, "start on untested SGLang versions")
CACHE = EnvVar(
    "SGLANG_HYBRID_CACHE",
    PATH,
    None,
    "converted models and compiled kernels (default: sglang-hybrid in the user's cache)",
)
LOAD_FILE = EnvVar("SGLANG_HYBRID_LOAD_FILE", PATH, None, "internal: load figures of SGLang's processes")
MEMORY_AT_START = EnvVar(
    "SGLANG_HYBRID_MEMORY_AT_START",
    BYTES,
    None,
    "internal: host memory that was free at the start",
)
EVENTS = EnvVar(
    "SGLANG_HYBRID_EVENTS",
    PATH,
    None,
    "internal: FIFO of what the console shows",
)

NATIVE_LIBRARY = EnvVar("SGLANG_HYBRID_NATIVE_LIBRARY", PATH, None, "internal: another build of the CPU kernels")
WORKER_TASK_BLOCKS = EnvVar(
    "SGLANG_HYBRID_WORKER_TASK_BLOCKS",
    TASK_BLOCKS,
    8,
    "internal: blocks of one task of the CPU worker",
)

# The C++ library reads this variable itself when it chooses a kernel. It is listed here to be documented.
CPU_VARIANT = EnvVar(
    "SGLANG_HYBRID_CPU_VARIANT",
    TEXT,
    None,
    "CPU kernel variant instead of the fastest: amx, avx512, avx2, neon-bf16, neon or portable",
)

VARIABLES: tuple[EnvVar[Any], ...] = (
    CONFIG,
    SET,
    ALLOW_UNTESTED_SGLANG,
    CACHE,
    LOAD_FILE,
    MEMORY_AT_START,
    EVENTS,
    NATIVE_LIBRARY,
    WORKER_TASK_BLOCKS,
    CPU_VARIANT,
)
