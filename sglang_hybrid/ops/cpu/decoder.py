"""Decode on a host without a GPU: wrappers of the library's ``sh_host_*`` functions, one call per layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cpu.dtypes import query_dtype
from sglang_hybrid.ops.cpu.library import checked, library
from sglang_hybrid.ops.cpu.openmp import gomp_parallel
from sglang_hybrid.ops.cpu.structs import Geometry, HostLayer, HostOptions, Rows


@dataclass(frozen=True)
class BlockSummaries:
    """Digests and sketch of one layer's blocks, which selection reads. The library keeps the tensors up to date."""

    digests: torch.Tensor  # [pages, KV heads, 2, head_dim], in the pool's dtype
    codes: torch.Tensor | None = None  # [pages, KV heads, 32, channels / 2]; None without a sketch
    channels: torch.Tensor | None = None  # [KV heads, channels], the channels of the sketch


@dataclass(frozen=True)
class SelectionRules:
    """Numbers of blocks for selection: a row of more than ``budget`` blocks attends to ``budget`` of its blocks."""

    budget: int
    sink: int
    recent: int


class HostKernels:
    """The library's state for one pool. Only one thread may call its methods at a time."""

    def __init__(
        self,
        pool_address: int,
        geometry: Geometry,
        layers: Sequence[BlockSummaries],
        rules: SelectionRules,
        threads: int,
    ) -> None:
        """Create the state. Raise NativeError for a shape that the kernels do not support.

        ``pool_address`` is where the pool is mapped in this process; ``layers`` has one element per layer of the pool.
        """
        self._library = library()
        self._pool_dtype, self._query_dtype = layers[0].digests.dtype, query_dtype(geometry)
        self._kept = (list(layers), geometry)  # the library holds pointers into these objects
        described = (HostLayer * len(layers))(*(_describe(layer) for layer in layers))
        channels = layers[0].channels
        options = HostOptions(
            threads, rules.budget, rules.sink, rules.recent, 0 if channels is None else channels.shape[1],
            reference.DIGEST_SPREAD, gomp_parallel(),
        )  # fmt: skip
        self._host = checked(
            self._library.sh_host_open, ctypes.c_void_p(pool_address), ctypes.byref(geometry), described,
            ctypes.byref(options),
        )  # fmt: skip

    def __del__(self) -> None:
        if host := getattr(self, "_host", None):
            self._library.sh_host_close(host)

    def begin(self, pages: torch.Tensor, lengths: torch.Tensor, new_tokens: torch.Tensor) -> None:
        """Set the rows of later calls, copying ``pages`` [rows, blocks] and the others [rows], int64 on the host."""
        pages, lengths, new_tokens = pages.contiguous(), lengths.contiguous(), new_tokens.contiguous()
        checked(
            self._library.sh_host_begin, self._host, pages.data_ptr(), pages.shape[1], lengths.data_ptr(),
            new_tokens.data_ptr(), pages.shape[0],
        )  # fmt: skip

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store K and V ``[new tokens, KV heads, head_dim]`` of the pool's dtype, and summarise their blocks."""
        stored = (_rows(part, self._pool_dtype) for part in (keys, values))
        checked(self._library.sh_host_store, self._host, layer, *stored)

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store one token per row and return its attention, ``[rows, query heads, head_dim]`` in float32."""
        out = torch.empty(query.shape, dtype=torch.float32)
        stored = (_rows(part, self._pool_dtype) for part in (keys, values))
        checked(
            self._library.sh_host_decode, self._host, layer, _rows(query, self._query_dtype), *stored, scale,
            out.data_ptr(),
        )  # fmt: skip
        return out

    def summarise(self, layer: int, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """Update summaries of pages that others wrote. ``filled`` is the number of valid tokens of each page."""
        pages, filled = pages.contiguous(), filled.contiguous()
        checked(self._library.sh_host_summarise, self._host, layer, pages.data_ptr(), filled.data_ptr(), pages.numel())


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> Rows:
    """Describe a tensor ``[rows, heads, dim]``, whose rows may be parts of longer rows.

    Raise ValueError for another dtype, or if the heads of a row are not contiguous.
    """
    if tensor.dtype != dtype:
        raise ValueError(f"the kernels were made for {dtype}, not {tensor.dtype}")
    if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
        raise ValueError(f"heads must lie side by side, not with strides {tensor.stride()}")
    return Rows(tensor.data_ptr(), tensor.stride(0) * tensor.element_size())


def _describe(layer: BlockSummaries) -> HostLayer:
    channels = None
    if layer.channels is not None:
        channels = ctypes.cast(layer.channels.data_ptr(), ctypes.POINTER(ctypes.c_int64))
    return HostLayer(layer.digests.data_ptr(), layer.codes.data_ptr() if layer.codes is not None else None, channels)
