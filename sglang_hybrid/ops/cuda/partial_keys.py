"""Partial keys on the device: the first columns of every key in a basis of its KV head, see ``memory/partial_keys.py``.

codes  [pages, H, 32, 2 * columns]   bytes: values of the keys' dtype
basis  [H, D, columns]               float32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.key_codes import LayerCodes
from sglang_hybrid.ops.cuda.structs import KernelStruct, struct
from sglang_hybrid.ops.cuda.tensors import address, dtype_code


@dataclass(frozen=True)
class PartialKeyCodes(LayerCodes):
    """One layer's partial keys: the codes that ``KeyCodes`` holds if its encoder is ``PartialKeys``."""

    encoder: ClassVar[str] = "encode_partial_keys"
    codes: torch.Tensor
    basis: torch.Tensor
    dtype: torch.dtype  # of keys and codes, 16 bits

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
