"""Checks of tensors before a launch. Kernels get bare pointers and cannot detect a wrong dtype, shape or stride."""

from __future__ import annotations

import torch

from sglang_hybrid.ops.cpu import structs
from sglang_hybrid.ops.reference import FP8

HALVES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes; kernels read and write this many at a time


def address(
    name: str, tensor: torch.Tensor | None, dtype: torch.dtype | tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> int | None:
    """Return the device address of ``tensor``, or None if it is None.

    Raises ValueError unless the tensor has one of the dtypes and the shape, is on a CUDA device, and is contiguous and,
    if it is of floating point, aligned to 16 bytes.
    """
    if tensor is None:
        return None
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, must be {' or '.join(map(str, dtypes))}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be {shape}")
    if not tensor.is_cuda:
        raise ValueError(f"{name} is on {tensor.device}, must be on a CUDA device")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, its strides are {tensor.stride()}")
    pointer: int = tensor.data_ptr()
    if tensor.is_floating_point() and pointer % _ALIGNMENT:
        raise ValueError(f"{name} must be aligned to {_ALIGNMENT} bytes")
    return pointer


def scalar_address(name: str, number: torch.Tensor | None, dtype: torch.dtype) -> int | None:
    """Return the device address of a tensor of one number, or None. The tensor may be a view of a larger one."""
    if number is None:
        return None
    if number.dtype != dtype or number.numel() != 1 or not number.is_cuda:
        raise ValueError(f"{name} must be one {dtype} on a CUDA device, not {tuple(number.shape)} of {number.dtype}")
    pointer: int = number.data_ptr()
    return pointer


def dtype_code(dtype: torch.dtype, queries: torch.dtype | None = None) -> int:
    """Return the kernels' DType for a pool's dtype and its queries' dtype. The two differ only if the pool is FP8."""
    return structs.dtype_code(*(str(one).removeprefix("torch.") for one in (dtype, queries or dtype)))


def pools_for(queries: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of keys and values that queries of this dtype can attend to."""
    return (queries, FP8)


def bit_words(blocks: int) -> int:
    """Return the number of 32-bit words that hold one bit for each block."""
    return -(-blocks // 32)


def active_address(active_rows: torch.Tensor | None) -> int | None:
    """Return the address of the number of real batch entries, one int32 in device memory, or None if all are real."""
    return None if active_rows is None else address("active_rows", active_rows.view(-1), torch.int32, (1,))
