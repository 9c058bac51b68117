"""Launch arguments that describe a layer's new keys, from which kernels compute digests and codes."""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.structs import KernelStruct, struct
from sglang_hybrid.ops.cuda.tensors import address


def keys_of_pages(
    keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor, heads: int, dim: int, dtype: torch.dtype
) -> KernelStruct:
    """Describe the first ``filled`` tokens of ``pages``, both ``[n]`` int32. Kernels skip pages outside the pool.

    keys ``[n, H, 32, D]`` on the device, any strides: prefill's ``[tokens, H, D]`` can be viewed in this shape.
    """
    count = keys.shape[0]
    if tuple(keys.shape[1:]) != (heads, BLOCK_TOKENS, dim):
        raise ValueError(f"keys {tuple(keys.shape)} do not fit {heads} KV heads of {dim} channels")
    _check(keys, dtype)
    return struct(
        "new_keys",
        keys=keys.data_ptr(),
        pages=address("pages", pages, torch.int32, (count,)),
        filled=address("filled", filled, torch.int32, (count,)),
        page_stride=keys.stride(0),
        head_stride=keys.stride(1),
        token_stride=keys.stride(2),
        count=count,
    )


def keys_of_step(step: Step, keys: torch.Tensor, heads: int, dim: int, dtype: torch.dtype) -> KernelStruct:
    """Describe the step's new tokens. keys ``[B, H, D]``; the stride between batch entries is free."""
    if tuple(keys.shape) != (step.batch, heads, dim):
        raise ValueError(f"keys are {tuple(keys.shape)}, must be {(step.batch, heads, dim)}")
    _check(keys, dtype)
    return struct(
        "new_keys",
        keys=keys.data_ptr(),
        step=step.arguments(),
        page_stride=keys.stride(0),
        head_stride=keys.stride(1),
        token_stride=0,
        count=step.batch,
    )


def _check(keys: torch.Tensor, dtype: torch.dtype) -> None:
    if not keys.is_cuda or keys.dtype != dtype:
        raise ValueError(f"keys are {keys.dtype} on {keys.device}, must be {dtype} on a CUDA device")
    if keys.stride(-1) != 1:
        raise ValueError(f"channels of keys must be contiguous, strides are {keys.stride()}")
