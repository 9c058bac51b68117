"""Codes of a layer's keys in device memory, encoded by GPU kernels; ``memory.key_codes.KeyCodes`` holds the codes."""

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
    """One layer's codes, one for each key. Code that stores keys must store their codes too."""

    encoder: ClassVar[str]  # name of the kernel that encodes keys
    codes: torch.Tensor  # [pages, H, 32, code_bytes] uint8
    dtype: torch.dtype  # of keys

    @property
    @abstractmethod
    def dim(self) -> int:
        """Number of channels of a key."""

    @property
    def heads(self) -> int:
        return self.codes.shape[1]

    @abstractmethod
    def arguments(self) -> KernelStruct:
        """Return addresses and layout of the codes for a launch. Raises ValueError if kernels do not support them."""

    def encode_pages(self, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """Write codes of the first ``filled`` tokens of pages. ``keys_of_pages`` explains the arguments."""
        self._encode(keys_of_pages(keys, pages, filled, self.heads, self.dim, self.dtype))

    def encode_step(self, step: Step, keys: torch.Tensor) -> None:
        """Write codes of the step's new tokens. keys ``[B, H, D]``; the stride between batch entries is free."""
        self._encode(keys_of_step(step, keys, self.heads, self.dim, self.dtype))

    def _encode(self, keys: KernelStruct) -> None:
        launch(self.encoder, to=self.arguments(), source=keys)


@dataclass(frozen=True)
class QuantisedCodes(LayerCodes):
    """Codes that hold the index of the nearest centroid for each part of a key, or the whole key.

    Of two centroids that are almost equally near, either may be chosen: sums are in another order than the reference's.
    """

    encoder: ClassVar[str] = "encode_keys"
    codes: torch.Tensor
    dtype: torch.dtype
    key_dim: int
    centroids: torch.Tensor | None = None  # [H, groups or 1, C, dim / groups] float32; None: codes are whole keys
    groups: int = 0  # parts of a key
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
