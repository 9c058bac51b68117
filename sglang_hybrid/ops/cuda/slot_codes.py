"""What slots of 8-bit codes need beside the codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops.cuda.tensors import address


@dataclass(frozen=True)
class SlotCodes:
    """Steps of channels, and a factor for each token of the slots ``[owners, H, N]`` of a layer."""

    steps: torch.Tensor  # [4, H, D] float32: reference.with_reciprocals
    factors: torch.Tensor  # [owners, H, N, 2, 32] float16: of the tokens' keys, and of their values


def no_factors(slots: torch.Tensor) -> torch.Tensor:
    """Return factors for slots ``[owners, H, N, 32, D]`` that hold nothing yet."""
    return torch.zeros(*slots.shape[:3], 2, BLOCK_TOKENS, dtype=torch.float16, device=slots.device)


def code_addresses(codes: SlotCodes | None, slots: torch.Tensor) -> dict[str, int | None]:
    """Return the kernels' arguments for ``codes`` of slots ``[owners, H, N, 32, D]``; null if slots keep numbers."""
    if codes is None:
        return {"steps": None, "factors": None}
    owners, heads, count, _, dim = slots.shape
    return {
        "steps": address("steps", codes.steps, torch.float32, (4, heads, dim)),
        "factors": address("factors", codes.factors, torch.float16, (owners, heads, count, 2, BLOCK_TOKENS)),
    }
