"""Reads the values of a GGUF's tensors, in Hugging Face's order and in pieces that fit in memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

from sglang_hybrid.commands.model.errors import DefaultModelError

Weights = npt.NDArray[np.float32]

_PIECE_WEIGHTS = 1 << 24  # 64 MiB as float32; rounding to bfloat16 needs a few copies of a piece


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape with rows first, as in torch. A GGUF names the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def pieces(tensor: Any, rotary_heads: int | None) -> Iterator[Weights]:
    """Yield the values in row order. ``rotary_heads``: undo llama.cpp's permutation of the rows of so many heads."""
    if rotary_heads is not None:
        yield undo_rotary_permutation(_values(tensor, tensor.data), rotary_heads)
        return
    rows = max(1, _PIECE_WEIGHTS // shape_of(tensor)[-1]) if tensor.data.ndim > 1 else len(tensor.data)
    for first in range(0, len(tensor.data), rows):
        yield _values(tensor, tensor.data[first : first + rows])


def undo_rotary_permutation(weights: Weights, heads: int) -> Weights:
    """Reorder the rows of a q or k projection from llama.cpp's rotary layout to Hugging Face's.

    Rotary embedding turns pairs of a head's channels. With D channels a head, llama.cpp pairs neighbours
    (0,1) (2,3) ..., Hugging Face pairs halves (0,D/2) (1,D/2+1) ...; the GGUF has its rows moved accordingly.
    """
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def to_bfloat16(weights: Weights) -> npt.NDArray[np.uint16]:
    """Return the upper half of each float32, rounded to nearest, ties to even. Values must be finite."""
    bits = np.ascontiguousarray(weights).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    return rounded


def _values(tensor: Any, stored: Any) -> Weights:
    try:
        return np.ascontiguousarray(dequantize(stored, tensor.tensor_type), dtype=np.float32)
    except NotImplementedError as error:
        raise DefaultModelError(
            f"{tensor.name} is stored as {tensor.tensor_type.name}, which the installed package gguf cannot read."
        ) from error
