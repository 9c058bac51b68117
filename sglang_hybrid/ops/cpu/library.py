"""Loader of the C++ library: finds and checks the library, and declares the types of its functions."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from sglang_hybrid import env, trusted_file
from sglang_hybrid.ops.cpu import build
from sglang_hybrid.ops.cpu.structs import (
    BlockAttention,
    EngineOptions,
    EngineStats,
    Field,
    Geometry,
    HostLayer,
    HostOptions,
    Job,
    Lists,
    MailboxLayout,
    Rows,
)

FILE = Path(__file__).with_name(build.LIBRARY)
INTERFACE = 8  # sh_interface of c_api.h
_ERROR_BYTES = 256

_ERROR = c_char_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "sh_interface_version": (c_uint32, []),
    "sh_variants": (c_char_p, []),
    "sh_variant_name": (c_char_p, [c_uint32, c_uint32, c_char_p]),
    "sh_attend": (c_int, [POINTER(BlockAttention), c_char_p, _ERROR]),
    "sh_read_bandwidth": (c_double, [c_void_p, c_uint64, c_uint32, POINTER(c_int32)]),
    "sh_mailbox_fields": (POINTER(Field), [POINTER(c_uint32)]),
    "sh_mailbox_layout": (c_int, [POINTER(Geometry), POINTER(MailboxLayout), _ERROR]),
    "sh_mailbox_create": (c_int, [c_void_p, c_uint64, POINTER(Geometry), _ERROR]),
    "sh_mailbox_check": (c_int, [c_void_p, c_uint64, c_uint64, POINTER(Geometry), _ERROR]),
    "sh_client_open": (c_void_p, [c_void_p, POINTER(Geometry), _ERROR]),
    "sh_client_close": (None, [c_void_p]),
    "sh_client_post": (c_int, [c_void_p, POINTER(Lists), c_uint32, POINTER(c_uint64), _ERROR]),
    "sh_client_collect": (
        c_uint32,
        [c_void_p, c_uint64, c_uint32, c_uint64, POINTER(c_uint32), c_void_p, c_void_p, c_void_p],
    ),
    "sh_client_wake": (None, [c_void_p]),
    "sh_client_completed": (c_uint64, [c_void_p]),
    "sh_client_heartbeat": (c_uint64, [c_void_p]),
    "sh_attend_local": (
        c_int,
        [c_void_p, POINTER(Geometry), POINTER(Lists), c_uint32, c_uint32, c_void_p, c_void_p, c_void_p, _ERROR],
    ),
    "sh_token_weights": (
        c_int,
        [c_void_p, POINTER(Geometry), POINTER(Lists), c_uint32, c_void_p, c_void_p, _ERROR],
    ),
    "sh_host_open": (
        c_void_p,
        [c_void_p, POINTER(Geometry), POINTER(HostLayer), POINTER(HostOptions), _ERROR],
    ),
    "sh_host_close": (None, [c_void_p]),
    "sh_host_begin": (c_int, [c_void_p, c_void_p, c_uint32, c_void_p, c_void_p, c_uint32, _ERROR]),
    "sh_host_store": (c_int, [c_void_p, c_uint32, POINTER(Rows), POINTER(Rows), _ERROR]),
    "sh_host_decode": (
        c_int,
        [c_void_p, c_uint32, POINTER(Rows), POINTER(Rows), POINTER(Rows), c_float, c_void_p, _ERROR],
    ),
    "sh_host_summarise": (c_int, [c_void_p, c_uint32, c_void_p, c_void_p, c_uint64, _ERROR]),
    "sh_engine_start": (c_void_p, [c_void_p, c_void_p, POINTER(Geometry), POINTER(EngineOptions), _ERROR]),
    "sh_engine_stop": (None, [c_void_p]),
    "sh_client_wait_for_end": (c_int, [c_void_p, c_uint64]),
    "sh_engine_threads": (c_uint32, [c_void_p]),
    "sh_engine_read_stats": (None, [c_void_p, POINTER(EngineStats)]),
    "sh_engine_take": (c_int, [c_void_p, c_uint64, POINTER(Job)]),
    "sh_engine_answer": (None, [c_void_p, c_void_p, c_void_p]),
}


class NativeError(RuntimeError):
    """The library is missing, is not the one this package was written for, or refused a call."""


@functools.cache
def library() -> Any:
    """Return the loaded library with typed functions. Raise NativeError, which says what to do, if it cannot be used.

    If the library in the package does not load, it is compiled from the sources that come with the package.
    """
    if other := env.NATIVE_LIBRARY.get():
        try:
            trusted_file.check(other)
        except (trusted_file.UntrustedFile, OSError) as error:
            raise NativeError(f"{env.NATIVE_LIBRARY.name}={other} cannot be used: {error}") from error
        loaded = _load(other)
    else:
        try:
            loaded = ctypes.CDLL(str(FILE))
        except OSError as error:  # made for another processor or a newer C library, or missing
            loaded = _load_built_here(str(error))
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise NativeError(f"{FILE.name} has no {name}: it is older than this package, build it again") from None
        function.restype, function.argtypes = result, arguments
    found = loaded.sh_interface_version()
    if found != INTERFACE:
        raise NativeError(f"{FILE.name} has interface {found}, this package needs {INTERFACE}: build it again")
    return loaded


def _load(file: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise NativeError(f"the CPU kernels cannot be loaded: {error}") from error


def _load_built_here(reason: str) -> ctypes.CDLL:
    """Compile and load the library. ``reason`` says why the library in the package did not load, for the error."""
    try:
        file = build.built()
        trusted_file.check(file)
    except (build.BuildError, trusted_file.UntrustedFile, OSError) as error:
        raise NativeError(
            f"the CPU kernels cannot be loaded ({reason}) and cannot be built here ({error}): install the package "
            "again, or run python tools/build_native.py in a checkout"
        ) from error
    return _load(file)


def checked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the library and return its result. Raise NativeError with the function's message if it fails.

    The function's last parameter must be ``error``, which is added here. Functions that return a pointer return null on
    failure, the others return a number other than 0.
    """
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    result = function(*arguments, error)
    failed = result is None if function.restype is c_void_p else result != 0  # type: ignore[attr-defined]
    if failed:
        raise NativeError(error.value.decode() or f"{function.__name__} failed")
    return result


def variants() -> list[str]:
    """Return the kernel variants that this machine can run, fastest first."""
    names: str = library().sh_variants().decode()
    return names.split(",")


def mailbox_fields() -> dict[str, dict[str, tuple[int, int]]]:
    """Return record -> field -> (offset, bytes) of all mailbox records, as mailbox.h defines them."""
    count = c_uint32()
    table = library().sh_mailbox_fields(ctypes.byref(count))
    fields: dict[str, dict[str, tuple[int, int]]] = {}
    for entry in table[: count.value]:
        fields.setdefault(entry.record.decode(), {})[entry.name.decode()] = (entry.offset, entry.bytes)
    return fields
