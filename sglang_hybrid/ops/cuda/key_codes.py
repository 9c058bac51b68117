"""Codes of a layer's keys in device memory, written by the GPU: what ``memory.key_codes.KeyCodes`` holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.digests import Step
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.structs import KernelStruct, struct
from sglang_hybrid.ops.cuda.tensors import HALVES, address, dtype_code


@dataclass(frozen=True)
class LayerCodes:
    """One layer's codes: indices of the nearest centroids of each part of a key, or whole keys."""

    codes: torch.Tensor  # [pages, H, 32, code_bytes] uint8
    dtype: torch.dtype  # of keys
    dim: int  # of keys
    centroids: torch.Tensor | None = None  # [H, groups or 1, C, dim / groups] float32; None: codes are keys
    groups: int = 0
    index_bytes: int = 0  # 1 or 2

    @property
    def heads(self) -> int:
        return self.codes.shape[1]

    def arguments(self) -> KernelStruct:
        pages, heads, _, code_bytes = self.codes.shape
        if self.dtype not in HALVES:
            raise ValueError(f"keys are {self.dtype}, must have 16 bits")
        if self.codes.data_ptr() % 16:
            raise ValueError("codes must be aligned to 16 bytes")
        if self.centroids is None:
            books, count = 0, 0
            if code_bytes != self.dim * self.dtype.itemsize:
                raise ValueError(f"{code_bytes} bytes are no key of {self.dim} values of {self.dtype}")
        else:
            _, books, count, part = self.centroids.shape
            if part * self.groups != self.dim or books not in (1, self.groups):
                raise ValueError(
                    f"codebooks {tuple(self.centroids.shape)} do not fit {self.groups} parts of {self.dim}"
                )
            if code_bytes != self.groups * self.index_bytes or count > 1 << 8 * self.index_bytes:
                raise ValueError(f"{code_bytes} bytes are not {self.groups} indices of {count} centroids")
        return struct(
            "key_codes",
            codes=address("codes", self.codes, torch.uint8, (pages, heads, BLOCK_TOKENS, code_bytes)),
            centroids=address(
                "centroids", self.centroids, torch.float32, (heads, books, count, self.dim // max(1, self.groups))
            ),
            pages=pages,
            kv_heads=heads,
            head_dim=self.dim,
            dtype=dtype_code(self.dtype),
            code_bytes=code_bytes,
            groups=self.groups,
            books=books,
            count=count,
            index_bytes=self.index_bytes,
        )


def encode_pages(to: LayerCodes, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
    """Codes of the first ``filled`` ``[n]`` tokens of ``pages`` ``[n]``, both int32. Pages without codes are left out.

    keys ``[n, H, 32, D]`` on the device, any strides, as for ``digest_pages``. Near-ties between centroids may fall to
    either of them: sums are in another order than the reference's.
    """
    count, heads, tokens, dim = keys.shape
    if (heads, tokens, dim) != (to.heads, BLOCK_TOKENS, to.dim):
        raise ValueError(f"keys {tuple(keys.shape)} do not fit codes {tuple(to.codes.shape)}")
    _check_keys(to, keys)
    launch(
        "encode_keys",
        to=to.arguments(),
        keys=keys.data_ptr(),
        pages=address("pages", pages, torch.int32, (count,)),
        filled=address("filled", filled, torch.int32, (count,)),
        page_stride=keys.stride(0),
        head_stride=keys.stride(1),
        token_stride=keys.stride(2),
        count=count,
    )


def encode_step(to: LayerCodes, step: Step, keys: torch.Tensor) -> None:
    """Codes of the step's new tokens, keys ``[B, H, D]``, whose entries may lie apart."""
    if tuple(keys.shape) != (step.batch, to.heads, to.dim):
        raise ValueError(f"keys are {tuple(keys.shape)}, must be {(step.batch, to.heads, to.dim)}")
    _check_keys(to, keys)
    launch(
        "encode_keys",
        to=to.arguments(),
        step=step.arguments(),
        keys=keys.data_ptr(),
        page_stride=keys.stride(0),
        head_stride=keys.stride(1),
        token_stride=0,
        count=step.batch,
    )


def _check_keys(to: LayerCodes, keys: torch.Tensor) -> None:
    if not keys.is_cuda or keys.dtype != to.dtype:
        raise ValueError(f"keys are {keys.dtype} on {keys.device}, must be {to.dtype} on a CUDA device")
    if keys.stride(-1) != 1:
        raise ValueError(f"channels of keys must be contiguous, strides are {keys.stride()}")
