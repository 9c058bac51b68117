"""Codes of a layer's keys in device memory, written by the GPU: what ``memory.key_codes.KeyCodes`` holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.new_keys import keys_of_pages, keys_of_step
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.structs import KernelStruct, struct
from sglang_hybrid.ops.cuda.tensors import HALVES, address, dtype_code


class LayerCodes(ABC):
    """One layer's codes of single keys. Whoever writes keys writes their codes, too."""

    encoder: ClassVar[str]  # the kernel that makes them
    codes: torch.Tensor  # [pages, H, 32, code_bytes] uint8
    dtype: torch.dtype  # of keys

    @property
    @abstractmethod
    def dim(self) -> int:
        """Of keys."""

    @property
    def heads(self) -> int:
        return self.codes.shape[1]

    @abstractmethod
    def arguments(self) -> KernelStruct:
        """Return where they are and how they are made. Raises ValueError for what kernels cannot read."""

    def encode_pages(self, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """Codes of the first tokens of pages: ``keys_of_pages`` has the arguments."""
        self._encode(keys_of_pages(keys, pages, filled, self.heads, self.dim, self.dtype))

    def encode_step(self, step: Step, keys: torch.Tensor) -> None:
        """Codes of the step's new tokens, keys ``[B, H, D]``, whose entries may lie apart."""
        self._encode(keys_of_step(step, keys, self.heads, self.dim, self.dtype))

    def _encode(self, keys: KernelStruct) -> None:
        launch(self.encoder, to=self.arguments(), source=keys)


@dataclass(frozen=True)
class QuantisedCodes(LayerCodes):
    """Indices of the nearest centroids of each part of a key, or whole keys.

    Near-ties between centroids may fall to either of them: sums are in another order than the reference's.
    """

    encoder: ClassVar[str] = "encode_keys"
    codes: torch.Tensor
    dtype: torch.dtype
    key_dim: int
    centroids: torch.Tensor | None = None  # [H, groups or 1, C, dim / groups] float32; None: codes are keys
    groups: int = 0
    index_bytes: int = 0  # 1 or 2

    @property
    def dim(self) -> int:
        return self.key_dim

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
