"""Measure how large the keys and values of a layer get: the steps in which their channels are stored in 8 bits."""

from __future__ import annotations

import torch

from sglang_hybrid.memory.sketches import rotated_pairs
from sglang_hybrid.ops.reference import CODE_MOST

_MARGIN = 1.25  # other texts have larger numbers than the calibration text; a number beyond the largest code is clipped
# Least step of a channel, as a part of its head's largest: other texts may have numbers in a channel that is 0 in this
# text, and so small a step makes no product of a query with a key less exact
_LEAST_PART = 1e-3
_LEAST_STEP = 1e-9  # of a head that is 0 everywhere. Its reciprocal is finite, so that 0 has code 0 in every kernel


class CodeSteps:
    """The step of each channel of one layer's keys and values, from the largest numbers in some texts.

    Rotation changes with a token's position how the norm of a pair of key channels is divided between both channels.
    So both have the step of the largest norm, which no position can exceed. Numbers that are not finite do not count.
    """

    def __init__(self, rotary_dim: int, neox: bool) -> None:
        """``rotary_dim`` and ``neox`` say which two channels the model rotates together."""
        self._rotary_dim, self._neox = rotary_dim, neox
        self._largest: torch.Tensor | None = None  # [2, KV heads, dim]: of keys and of values

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add a text's rotated keys ``[tokens, KV heads, dim]`` and its values, of the same shape."""
        pair = rotated_pairs(keys.shape[-1], self._rotary_dim, self._neox).to(keys.device)
        squares = _finite(keys).square()
        norms = torch.zeros_like(squares).index_add_(2, pair, squares).amax(dim=0).sqrt()
        largest = torch.stack((norms[:, pair], _finite(values).abs().amax(dim=0))).cpu()
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def steps(self) -> torch.Tensor:
        """Return the steps ``[2, KV heads, dim]`` of keys and of values, float32, on the CPU. Call ``add`` before."""
        assert self._largest is not None, "no text was added"
        steps = self._largest * (_MARGIN / CODE_MOST)
        least = (steps.amax(dim=-1, keepdim=True) * _LEAST_PART).clamp(min=_LEAST_STEP)
        return torch.maximum(steps, least).float()


def _finite(numbers: torch.Tensor) -> torch.Tensor:
    # in double precision the square of every float32 is finite
    return numbers.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
