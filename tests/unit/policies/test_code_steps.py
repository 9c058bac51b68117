"""The steps of 8-bit codes: large enough for the text at any position, and never 0."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.ops.reference import CODE_MOST
from sglang_hybrid.policies.scout.code_steps import CodeSteps

HEADS, DIM = 2, 16


def numbers(seed: int, tokens: int = 50) -> torch.Tensor:
    """Return keys or values whose channels differ in size by orders of magnitude."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.exp(2 * torch.randn(HEADS, DIM, generator=random))
    return torch.randn(tokens, HEADS, DIM, generator=random) * sizes


def rotated(keys: torch.Tensor, angles: torch.Tensor, neox: bool) -> torch.Tensor:
    """Rotate each pair of the first channels by its angle ``[tokens, pairs]``, as complex numbers."""
    pairs = angles.shape[1]
    of_pairs = keys[..., : 2 * pairs].unflatten(-1, (2, pairs) if neox else (pairs, 2))
    axis = -2 if neox else -1
    turned = torch.complex(*of_pairs.double().unbind(axis)) * torch.polar(torch.ones(()).double(), angles[:, None])
    parts = torch.stack((turned.real, turned.imag), dim=axis).flatten(-2)
    return torch.cat((parts, keys[..., 2 * pairs :].double()), dim=-1)


def of_text(keys: torch.Tensor, values: torch.Tensor, rotary_dim: int = 0, neox: bool = True) -> torch.Tensor:
    measured = CodeSteps(rotary_dim, neox)
    measured.add(keys, values)
    return measured.steps()


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [DIM, DIM // 2, 0])
@given(seed=st.integers(0, 2**32 - 1))
def test_steps_cover_the_keys_at_any_positions_and_the_values(seed: int, rotary_dim: int, neox: bool) -> None:
    keys, values = numbers(seed), numbers(seed + 1)
    steps = of_text(keys, values, rotary_dim, neox)
    assert (steps.shape, steps.dtype) == ((2, HEADS, DIM), torch.float32)
    angles = torch.rand(len(keys), rotary_dim // 2, generator=torch.Generator().manual_seed(seed)).double() * 7
    assert (rotated(keys, angles, neox).abs() <= CODE_MOST * steps[0]).all()
    assert (values.abs() <= CODE_MOST * steps[1]).all()


@pytest.mark.parametrize("neox", [True, False])
def test_some_position_uses_most_of_the_codes(neox: bool) -> None:
    """A pair whose norm is all in one channel has no smaller steps: the margin is a fifth of the codes."""
    keys = numbers(1)
    steps = of_text(keys, keys, DIM // 2, neox)
    angles = torch.linspace(0, 2 * torch.pi, 1000).double()
    largest = torch.stack([rotated(keys, a.expand(len(keys), DIM // 4), neox).abs().amax(dim=0) for a in angles]).amax(
        0
    )
    used = largest > 2e-3 * largest.amax(dim=-1, keepdim=True)  # smaller channels have the least step of their head
    assert used.sum() > DIM
    assert torch.allclose(1.25 * largest[used], CODE_MOST * steps[0][used].double(), rtol=1e-3)


def test_partners_share_a_step_and_channels_that_are_not_rotated_have_their_own() -> None:
    keys = torch.zeros(3, 1, 6)
    keys[1, 0] = torch.tensor([3.0, 0.5, 4.0, -0.5, 7.0, -2.0])
    values = torch.arange(6.0).expand(3, 1, -1)
    unit = 1.25 / 127
    pair = 0.5**0.5
    neox = of_text(keys, values, rotary_dim=4)
    assert torch.allclose(neox[0, 0], unit * torch.tensor([5.0, pair, 5.0, pair, 7.0, 2.0]))
    assert torch.allclose(neox[1, 0, 1:], unit * torch.arange(1.0, 6.0))
    neighbours = of_text(keys, values, rotary_dim=4, neox=False)
    first, second = (3.0**2 + 0.5**2) ** 0.5, (4.0**2 + 0.5**2) ** 0.5
    assert torch.allclose(neighbours[0, 0], unit * torch.tensor([first, first, second, second, 7.0, 2.0]))


def test_several_texts_have_the_steps_of_their_joined_text() -> None:
    keys, values = numbers(2), numbers(3)
    measured = CodeSteps(DIM, True)
    for part in (slice(0, 1), slice(1, 40), slice(40, None)):
        measured.add(keys[part], values[part])
    assert torch.equal(measured.steps(), of_text(keys, values, DIM))


def test_a_channel_that_is_always_zero_has_a_step_for_the_numbers_of_other_texts() -> None:
    keys, values = numbers(4), numbers(5)
    keys[..., [1, 9]] = 0.0  # partners
    values[..., 2] = 0.0
    steps = of_text(keys, values, DIM)
    largest = steps.amax(dim=-1)
    assert torch.allclose(steps[0, :, [1, 9]], 1e-3 * largest[0, :, None].expand(-1, 2))
    assert torch.allclose(steps[1, :, 2], 1e-3 * largest[1])


def test_a_head_that_is_always_zero_has_steps_by_which_zero_can_be_divided() -> None:
    keys, values = numbers(4), numbers(5)
    keys[:, 1], values[:, 1] = 0.0, 0.0
    steps = of_text(keys, values, DIM)[:, 1]
    assert (steps > 0).all()
    assert steps.reciprocal().isfinite().all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_do_not_count(broken: float) -> None:
    keys, values = numbers(6), numbers(7)
    keys[0], values[0] = 0.0, 0.0
    expected = of_text(keys, values, DIM)
    keys[0], values[0] = broken, broken
    assert torch.equal(of_text(keys, values, DIM), expected)


def test_the_largest_numbers_of_a_dtype_have_finite_steps() -> None:
    largest = torch.full((2, HEADS, DIM), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    assert of_text(largest, -largest, DIM).isfinite().all()
