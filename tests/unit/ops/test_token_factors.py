"""Codes of 8 bits, whose tokens have factors of their own: ``to_codes`` and ``of_codes`` of the reference."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import seeded

from sglang_hybrid.ops import reference

HEADS, TOKENS, DIM = 2, 50, 64


def numbers(seed: int, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens ``[H, T, D]``, and steps ``[H, D]`` by which code 127 is 1 in each channel's own size."""
    sizes = 2.0 ** torch.randint(-8, 8, (HEADS, DIM), generator=seeded(seed))
    tokens = (2 * torch.rand(HEADS, TOKENS, DIM, generator=seeded(seed + 1)) - 1) * largest
    return tokens * sizes[:, None], sizes / reference.CODE_MOST


@pytest.mark.parametrize("largest", [1e-3, 0.3, 1.0, 3.9])
def test_a_tokens_error_is_at_most_half_a_code_of_its_own_range(largest: float) -> None:
    tokens, steps = numbers(0, largest)
    codes, factors = reference.to_codes(tokens, steps)
    error = (reference.of_codes(codes, steps, factors) - tokens).abs() / steps[:, None] / reference.CODE_MOST
    range_of_token = (tokens / steps[:, None] / reference.CODE_MOST).abs().amax(dim=-1, keepdim=True)
    assert (error <= 0.502 / reference.CODE_MOST * range_of_token).all()
    assert ((codes.int() - 128).abs().amax(dim=-1) == reference.CODE_MOST).all(), "the whole range of codes is used"


def test_codes_of_what_codes_stand_for_are_the_same() -> None:
    tokens, steps = numbers(1, 1.0)
    codes, factors = reference.to_codes(tokens, steps)
    again = reference.to_codes(reference.of_codes(codes, steps, factors), steps)
    assert torch.equal(again[0], codes) and torch.equal(again[1], factors)


def test_one_number_far_beyond_its_range_leaves_something_of_the_others() -> None:
    tokens, steps = numbers(2, 1.0)
    far = tokens.clone()
    far[:, :, 5] = 1e6 * steps[:, 5:6]
    codes, factors = reference.to_codes(far, steps)
    assert (factors == reference.MOST_FACTOR).all() and (codes[:, :, 5] == 255).all()
    error = (reference.of_codes(codes, steps, factors) - tokens)[..., 6:].abs() / steps[:, None, 6:]
    assert error.max() <= 0.5 * reference.MOST_FACTOR


def test_numbers_that_are_not_finite_and_tokens_of_zeros_have_codes() -> None:
    tokens, steps = torch.zeros(HEADS, 4, DIM), torch.ones(HEADS, DIM)
    tokens[0, 1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    codes, factors = reference.to_codes(tokens, steps)
    assert codes[0, 1, :4].tolist() == [1, 255, 1, 128]
    assert (codes[1] == 128).all() and (factors[1] == reference.LEAST_FACTOR).all()
