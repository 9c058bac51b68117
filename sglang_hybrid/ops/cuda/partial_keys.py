"""Partial keys on the device: the first columns of every key in a basis of its KV head, as ``memory/partial_keys.py``.

    codes  [pages, H, 32, 2 * columns]   bytes: values of the keys' dtype
    basis  [H, D, columns]               float32

``append`` and ``digest_pages`` write them with digests, so whoever writes keys keeps them up to date.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.structs import KernelStruct, struct
from sglang_hybrid.ops.cuda.tensors import address, dtype_code

if TYPE_CHECKING:  # which imports this module
    from sglang_hybrid.ops.cuda.digests import Step


@dataclass(frozen=True)
class LayerPartialKeys:
    """One layer's partial keys: what ``KeyCodes`` holds, encoded by ``PartialKeys``."""

    codes: torch.Tensor
    basis: torch.Tensor
    dtype: torch.dtype  # of keys and codes, 16 bits

    @property
    def heads(self) -> int:
        return self.basis.shape[0]

    @property
    def dim(self) -> int:
        return self.basis.shape[1]

    def arguments(self) -> KernelStruct:
        heads, dim, columns = self.basis.shape
        if self.codes.data_ptr() % 8 or columns % 4 or self.dtype.itemsize != 2:
            raise ValueError(f"partial keys are read by four 16-bit columns, not {columns} of {self.dtype}")
        of_codes = (self.codes.shape[0], heads, BLOCK_TOKENS, columns * self.dtype.itemsize)
        return struct(
            "partial_keys",
            codes=address("codes", self.codes, torch.uint8, of_codes),
            basis=address("basis", self.basis, torch.float32, (heads, dim, columns)),
            pages=self.codes.shape[0],
            kv_heads=heads,
            head_dim=dim,
            columns=columns,
            dtype=dtype_code(self.dtype),
        )


def encode_tokens(partial: LayerPartialKeys, step: Step, keys: torch.Tensor) -> None:
    """``PartialKeys.encode`` of the step's new keys ``[B, H, D]``, as ``append`` has checked them."""
    launch(
        "encode_tokens",
        partial=partial.arguments(),
        step=step.arguments(),
        keys=keys.data_ptr(),
        key_stride=keys.stride(0),
    )


def encode_pages(partial: LayerPartialKeys, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
    """The same of ``pages`` ``[n]`` with keys ``[n, H, 32, D]``, as ``digest_pages`` has checked them."""
    count = keys.shape[0]
    launch(
        "encode_pages",
        partial=partial.arguments(),
        keys=keys.data_ptr(),
        pages=address("pages", pages, torch.int32, (count,)),
        filled=address("filled", filled, torch.int32, (count,)),
        page_stride=keys.stride(0),
        head_stride=keys.stride(1),
        token_stride=keys.stride(2),
        count=count,
    )
