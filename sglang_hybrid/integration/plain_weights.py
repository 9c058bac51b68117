"""Read the matrix of a linear layer, whatever the format of its weights."""

from __future__ import annotations

from typing import Any

import torch

_ROWS = 1024  # of the identity, per call of the layer
_MOST_DIFFERENCE = 0.05  # relative, of the layer's output and its matrix's: eight bits have a few per cent
_LARGEST_EXACT = 256.0  # a power of two within float8: inputs of this size lose nothing when they are quantised


def is_plain(weight: Any) -> bool:
    """Return True if the weight holds plain numbers. Eight-bit floating point does not: its scales are elsewhere."""
    return weight is not None and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)


def matrix_of(linear: Any, inputs: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the matrix ``[outputs, inputs]`` without the bias; None if no such matrix can be read from the layer.

    Plain weights are returned as they are, not copied. Quantised weights of any format are read by calling the layer
    with the identity. Layers that sum over ranks cannot be read that way.
    """
    weight: Any = getattr(linear, "weight", None)
    if is_plain(weight):
        plain: torch.Tensor = weight.data
        return plain if plain.ndim == 2 and plain.shape[1] == inputs else None
    try:
        with torch.no_grad():
            matrix = _by_identity(linear, inputs, dtype)
            return matrix if _agrees(linear, matrix) else None
    except Exception:  # any error that kernels raise for inputs that they do not support
        return None


def _by_identity(linear: Any, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    device = next(linear.parameters()).device
    scale = getattr(linear, "input_scale", None)  # fixed scale of inputs, if any: larger inputs would be clipped
    size = 1.0 if scale is None else _LARGEST_EXACT * float(scale.max())
    parts = []
    for first in range(0, inputs, _ROWS):
        rows = torch.arange(first, min(first + _ROWS, inputs), device=device)
        one_hot = torch.nn.functional.one_hot(rows, inputs).to(dtype) * size
        parts.append(_without_bias(linear, one_hot) / size)
    return torch.cat(parts).T.contiguous().to(dtype)


def _without_bias(linear: Any, given: torch.Tensor) -> torch.Tensor:
    given_out = linear(given)
    out: torch.Tensor = (given_out[0] if isinstance(given_out, tuple) else given_out).float()
    bias = getattr(linear, "bias", None)
    return out if bias is None else out - bias.float()


def _agrees(linear: Any, matrix: torch.Tensor) -> bool:
    probe = torch.randn(8, matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(matrix)
    out, expected = _without_bias(linear, probe), probe.float() @ matrix.float().T
    return bool((out - expected).norm() <= _MOST_DIFFERENCE * expected.norm())
