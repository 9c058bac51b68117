"""Fit what a calibrated prediction adds to the raw one: ridge regression on the inputs of all layers of some text.

The regression fits the difference between the real query and the raw prediction, so that the penalty pulls toward the
raw predictor and not toward zero. Only sums over tokens are kept, on the device of the weights: memory does not grow
with the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_hybrid.ops import reference
from sglang_hybrid.policies.scout.predictor import Correction, QueryPredictor, QueryWeights

# Candidate penalties on squared coefficients, relative to the mean square of an input channel. Each layer's
# penalty is chosen on unseen text.
PENALTIES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


class LayerFit:
    """Regression sums of one layer: inputs of the layer before against the errors of the raw prediction."""

    def __init__(self, weights: QueryWeights) -> None:
        hidden, width = weights.norm.shape[0], weights.projection.shape[0]
        self._eps = weights.norm_eps
        self._raw = QueryPredictor(weights)
        self.tokens = 0
        device = weights.projection.device
        # the last channel is constant 1
        self._inputs = torch.zeros(hidden + 1, hidden + 1, dtype=torch.float64, device=device)
        self._targets = torch.zeros(hidden + 1, width, dtype=torch.float64, device=device)

    @staticmethod
    def device_bytes(weights: QueryWeights) -> int:
        """Return the bytes that the sums of a layer take."""
        hidden, width = weights.norm.shape[0], weights.projection.shape[0]
        return (hidden + 1) * (hidden + 1 + width) * torch.float64.itemsize

    def add(self, before: torch.Tensor, own: torch.Tensor) -> None:
        """Add a text: inputs of the layer before (``before``) and of this one (``own``), both ``[tokens, hidden]``."""
        unit = reference.rms_unit(before, self._eps)
        inputs = torch.cat((unit, torch.ones_like(unit[:, :1])), dim=1)
        wrong = (self._raw.project(own) - self._raw.project(before)).float()
        self._inputs += inputs.T @ inputs
        self._targets += inputs.T @ wrong
        self.tokens += before.shape[0]

    def solve(self, penalty: float) -> FullCorrection:
        size = self._inputs.shape[0]
        scale = self._inputs.diagonal()[:-1].mean()
        ridge = torch.full((size,), float(penalty * scale), dtype=torch.float64, device=self._inputs.device)
        ridge[-1] = 0.0  # a constant is not penalised
        solution = torch.linalg.solve(self._inputs + ridge.diag(), self._targets)
        return FullCorrection(solution[:-1].T.float(), solution[-1].float(), self._inputs[:-1, :-1] / self.tokens)


@dataclass(frozen=True)
class FullCorrection:
    """A correction with a full matrix, and the mean square of its inputs, which shows which directions matter."""

    matrix: torch.Tensor  # [query heads * head_dim, hidden]
    bias: torch.Tensor
    inputs: torch.Tensor  # [hidden, hidden]

    def full(self) -> Correction:
        return Correction(self.matrix, None, self.bias)

    @cached_property
    def _basis(self) -> torch.Tensor:
        """Return the directions in which the correction moves queries most *on these inputs*, strongest first."""
        matrix = self.matrix.double()
        # single precision separates directions well enough, and takes half of the time
        vectors: torch.Tensor = torch.linalg.eigh((matrix @ self.inputs @ matrix.T).float()).eigenvectors
        return vectors.flip(1)

    def low_rank(self, rank: int) -> Correction:
        """Return the low-rank correction closest *on these inputs*, not as a matrix (reduced-rank regression)."""
        basis = self._basis[:, :rank].contiguous()
        return Correction(basis, basis.T @ self.matrix, self.bias)


def cosines(real: torch.Tensor, predicted: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the cosine of every head of every token: ``[tokens, query heads]``. Rotation does not change cosines."""
    a, b = (x.float().unflatten(-1, (-1, head_dim)) for x in (real, predicted))
    return torch.nn.functional.cosine_similarity(a, b, dim=-1)
