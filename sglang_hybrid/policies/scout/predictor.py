"""Predict layer i+1's query from layer i's input.

A raw prediction (ScoutAttention) applies layer i+1's own norm and projection to the input of layer i, as if layer i
changed nothing. A calibrated prediction adds a linear correction that was fitted beforehand:
``q = W_Q norm(x) + C rms(x) + b``, where ``C`` is a full matrix or the product of two thin ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.ops import reference


@dataclass(frozen=True)
class QueryWeights:
    """The weights that compute one layer's query. Plain weights are views of the model's, not copies."""

    norm: torch.Tensor  # [hidden], gain of the layer's input norm
    norm_eps: float
    projection: torch.Tensor  # [query heads * head_dim, hidden]
    bias: torch.Tensor | None
    head_dim: int
    head_norm: torch.Tensor | None  # [head_dim], gain of the norm of each head (Qwen3)
    head_norm_eps: float
    rotary: torch.Tensor  # [positions, rotary dim], cosines then sines
    neox: bool  # rotates the two halves of a head against each other, not neighbouring channels


@dataclass(frozen=True)
class Correction:
    """What calibration adds to a query before the norm of the heads and rotation: ``rms(x) right^T left^T + bias``.

    ``left`` [query heads * head_dim, rank] and ``right`` [rank, hidden]; ``right`` is None for a full matrix, which is
    ``left`` alone.
    """

    left: torch.Tensor
    right: torch.Tensor | None
    bias: torch.Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Correction:
        return Correction(
            self.left.to(device, dtype),
            None if self.right is None else self.right.to(device, dtype),
            self.bias.to(device, dtype),
        )


def merged_projection(weights: QueryWeights, correction: Correction) -> torch.Tensor:
    """Merge W_Q, the norm's gain and a full correction into one matrix for ``rms(x)``, as fast as W_Q alone."""
    gain = weights.norm.float()
    return (weights.projection.float() * gain + correction.left.float()).to(weights.projection.dtype)


class QueryPredictor:
    """Predicts the queries of one layer before the layer runs."""

    def __init__(self, weights: QueryWeights, correction: Correction | None = None) -> None:
        self._weights = weights
        self._merged: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._correction = correction
        if correction is not None and correction.right is None:
            bias = correction.bias if weights.bias is None else correction.bias + weights.bias
            self._merged = (merged_projection(weights, correction), bias.to(weights.projection.dtype))

    def query(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Predict: inputs ``[n, hidden]`` of the layer before, positions ``[n]`` -> ``[n, query heads, head_dim]``."""
        return self.finish(self.project(inputs), positions)

    def project(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute queries up to the projection: ``[tokens, query heads * head_dim]``. Calibration fits this part."""
        weights = self._weights
        unit = reference.rms_unit(inputs, weights.norm_eps).to(weights.projection.dtype)
        if self._merged is not None:
            return torch.nn.functional.linear(unit, *self._merged)
        projected = torch.nn.functional.linear(unit * weights.norm, weights.projection, weights.bias)
        if (correction := self._correction) is not None and correction.right is not None:
            thin = torch.nn.functional.linear(unit, correction.right)
            projected = projected + torch.nn.functional.linear(thin, correction.left, correction.bias)
        return projected

    def finish(self, projected: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply the norm of the heads, if the model has one, and the rotation."""
        weights = self._weights
        heads = projected.unflatten(-1, (-1, weights.head_dim))
        if weights.head_norm is not None:
            heads = (reference.rms_unit(heads, weights.head_norm_eps) * weights.head_norm).to(projected.dtype)
        return reference.rotate(heads, weights.rotary[positions], weights.neox)
