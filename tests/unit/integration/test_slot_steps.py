"""Each rank gets the steps of its own KV heads, for the layers of its pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_hybrid.integration.slot_steps import rank_steps
from sglang_hybrid.ops.reference import with_reciprocals

LAYERS, HEADS, DIM = 4, 4, 8


def calibrated(heads: int = HEADS, layers: range = range(LAYERS)) -> Any:
    return SimpleNamespace(steps={layer: torch.rand(2, heads, DIM) for layer in layers})


def pool(first: int = 0, layers: int = LAYERS) -> Any:
    return SimpleNamespace(start_layer=first, layer_num=layers, device="cpu")


def test_a_rank_takes_its_heads_of_a_profile_and_all_of_its_own_calibration() -> None:
    whole, own = calibrated(), calibrated(heads=2)
    of_profile = rank_steps(whole, pool(), slice(2, 4))
    of_own = rank_steps(own, pool(), slice(2, 4))
    assert of_profile is not None and of_own is not None
    for layer in range(LAYERS):
        assert torch.equal(of_profile[layer], with_reciprocals(whole.steps[layer][:, 2:]))
        assert of_profile[layer].is_contiguous()
        assert torch.equal(of_own[layer], with_reciprocals(own.steps[layer]))


def test_a_pool_of_later_layers_has_the_steps_of_its_own_layers() -> None:
    whole = calibrated()
    steps = rank_steps(whole, pool(first=1, layers=2), slice(0, HEADS))
    assert steps is not None
    assert len(steps) == 2
    assert torch.equal(steps[0], with_reciprocals(whole.steps[1]))


def test_without_the_steps_of_every_layer_there_are_none() -> None:
    assert rank_steps(None, pool(), slice(0, HEADS)) is None
    assert rank_steps(calibrated(layers=range(0)), pool(), slice(0, HEADS)) is None
    assert rank_steps(calibrated(layers=range(1, LAYERS)), pool(), slice(0, HEADS)) is None
