"""Layer i+1's query, from layer i's input.

Raw (ScoutAttention): layer i+1's own norm and projection on the input of layer i, as if layer i changed nothing.
Calibrated: the same plus a linear correction that was fitted offline, ``q = W_Q norm(x) + C rms(x) + b``, where ``C``
is a full matrix or the product of two thin ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.ops import reference


@dataclass(frozen=True)
class QueryWeights:
    """What makes one layer's query, as the model has it. Views of the model's weights, not copies."""

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
    """What calibration adds before the norm of the heads and the rotation: ``rms(x) right^T left^T + bias``.

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
    """W_Q with the norm's gain and a full correction in it: a matrix for ``rms(x)`` that costs as much time as W_Q."""
    gain = weights.norm.float()
    return (weights.projection.float() * gain + correction.left.float()).to(weights.projection.dtype)


class QueryPredictor:
    """The queries of one layer, before it runs."""

    def __init__(self, weights: QueryWeights, correction: Correction | None = None) -> None:
        self._weights = weights
        self._merged: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._correction = correction
        if correction is not None and correction.right is None:
            bias = correction.bias if weights.bias is None else correction.bias + weights.bias
            self._merged = (merged_projection(weights, correction), bias.to(weights.projection.dtype))

    def query(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """inputs ``[n, hidden]`` of the layer before, positions ``[n]`` -> ``[n, query heads, head_dim]``."""
        return self.finish(self.project(inputs), positions)

    def project(self, inputs: torch.Tensor) -> torch.Tensor:
        """Up to the projection: ``[tokens, query heads * head_dim]``. This much calibration fits."""
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
        """Norm of the heads where the model has one, and rotation."""
        weights = self._weights
        heads = projected.unflatten(-1, (-1, weights.head_dim))
        if weights.head_norm is not None:
            heads = (reference.rms_unit(heads, weights.head_norm_eps) * weights.head_norm).to(projected.dtype)
        return reference.rotate(heads, weights.rotary[positions], weights.neox)
