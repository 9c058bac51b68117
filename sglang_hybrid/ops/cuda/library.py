"""Load the CUDA library for the current device, declare the types of its functions, and launch its kernels."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch

from sglang_hybrid import trusted_file
from sglang_hybrid.ops.cuda.build import built
from sglang_hybrid.ops.cuda.errors import CudaError
from sglang_hybrid.ops.cuda.structs import STRUCTS, KernelStruct, struct

_STREAM = c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "sh_cuda_error": (c_char_p, [c_int]),
    "sh_cuda_bytes_of": (c_uint64, [c_char_p]),
    "sh_cuda_register": (c_int, [c_void_p, c_uint64, POINTER(c_void_p)]),
    "sh_cuda_unregister": (c_int, [c_void_p]),
    "sh_cuda_attend_units": (c_int, [c_uint32, c_uint32, POINTER(c_uint32)]),
    "sh_cuda_mailbox_attach": (c_int, [c_void_p, c_uint64, c_uint64, _STREAM]),
}


@functools.cache
def library() -> Any:
    """Return the library for the current device. Compiles it, if it is not cached, which takes a few seconds.

    Raises CudaError if there is no CUDA device, or if the library cannot be built, trusted or loaded.
    """
    if not torch.cuda.is_available():
        raise CudaError("the CUDA kernels need a CUDA device, and torch sees none")
    major, minor = torch.cuda.get_device_capability()
    path = built(10 * major + minor)
    try:
        trusted_file.check(path)
    except trusted_file.UntrustedFile as error:
        raise CudaError(f"the CUDA kernels are not loaded: {error}") from error
    return load(path)


def load(path: Path) -> Any:
    """Load the library from a file and declare the types of its functions.

    Raises CudaError if the file cannot be loaded, or if a struct has another size in C++ than in Python.
    """
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise CudaError(f"the CUDA kernels cannot be loaded: {error}; remove {path} and start again") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    for name, kind in STRUCTS.items():
        if launcher := getattr(loaded, name.replace("sh_", "sh_cuda_", 1), None):
            launcher.restype, launcher.argtypes = c_int, [POINTER(kind), _STREAM]
        found = loaded.sh_cuda_bytes_of(name.encode())
        if found not in (0, ctypes.sizeof(kind)):  # 0: the struct is only a part of other structs
            raise CudaError(f"{name} has {found} bytes in C++ and {ctypes.sizeof(kind)} in Python")
    return loaded


def checked(function: Any, *arguments: Any) -> None:
    """Call a function that returns a cudaError_t. Raise CudaError with CUDA's message if it fails."""
    error = function(*arguments)
    if error:
        raise CudaError(f"{function.__name__}: {library().sh_cuda_error(error).decode()} (CUDA error {error})")


def launch(name: str, **fields: Any) -> KernelStruct:
    """Launch ``sh_cuda_<name>`` on torch's current stream and return the struct ``sh_<name>`` made of ``fields``."""
    arguments = struct(name, **fields)
    checked(getattr(library(), f"sh_cuda_{name}"), ctypes.byref(arguments), torch.cuda.current_stream().cuda_stream)
    return arguments
