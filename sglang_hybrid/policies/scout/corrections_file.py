"""Corrections, channel orders, skews and steps as named tensors: the common part of profile and calibration files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_hybrid.policies.scout.predictor import Correction
from sglang_hybrid.policies.scout.profile_facts import ProfileError

_ORTHOGONAL = 1e-3  # largest difference between the product with its transpose and the unit matrix


class Calibrated(Protocol):
    """What a server needs from a profile or from a calibration."""

    @property
    def corrections(self) -> Mapping[int, Correction]: ...  # by layer; the first layer has none

    @property
    def channels(self) -> Mapping[int, torch.Tensor]: ...  # by layer [KV heads, head_dim], the most informative first

    @property
    def cosines(self) -> Mapping[int, float]: ...  # by layer: of predicted and real queries, when it was fitted

    @property
    def skews(self) -> Mapping[int, torch.Tensor]: ...  # by layer [KV heads, head_dim, head_dim], see infinigen.skew

    @property
    def steps(self) -> Mapping[int, torch.Tensor]: ...  # by layer [2, KV heads, head_dim], see code_steps


@dataclass(frozen=True)
class Shape:
    """The sizes that the tensors of a file must fit."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int


def to_tensors(calibrated: Calibrated) -> dict[str, torch.Tensor]:
    """Return the tensors of a file. Of each layer N, if it has them::

    layers.N.left, .right, .bias    the correction of predicted queries; no right: left is the whole matrix
    layers.N.channels               [KV heads, head_dim] uint8, the most telling channel first
    layers.N.skew                   [KV heads, head_dim, head_dim] float32, the most telling column first
    layers.N.steps                  [2, KV heads, head_dim] float32, of the 8-bit codes of keys and of values
    """
    tensors = {}
    for layer, correction in calibrated.corrections.items():
        tensors[f"layers.{layer}.left"] = correction.left.contiguous()
        tensors[f"layers.{layer}.bias"] = correction.bias.contiguous()
        if correction.right is not None:
            tensors[f"layers.{layer}.right"] = correction.right.contiguous()
    for layer, order in calibrated.channels.items():
        tensors[f"layers.{layer}.channels"] = order.to(torch.uint8).contiguous()
    for layer, skew in calibrated.skews.items():
        tensors[f"layers.{layer}.skew"] = skew.float().contiguous()
    for layer, steps in calibrated.steps.items():
        tensors[f"layers.{layer}.steps"] = steps.float().contiguous()
    return tensors


def corrections_of(tensors: Mapping[str, torch.Tensor], shape: Shape) -> dict[int, Correction]:
    """Return the corrections by layer. Raise ProfileError for matrices that do not fit ``shape``."""
    corrections = {}
    width, hidden = shape.query_heads * shape.head_dim, shape.hidden
    for layer in range(1, shape.layers):
        left, right, bias = (tensors.get(f"layers.{layer}.{part}") for part in ("left", "right", "bias"))
        if left is None and bias is None:
            continue
        if left is None or bias is None or bias.shape != (width,) or left.ndim != 2 or left.shape[0] != width:
            raise ProfileError(f"damaged: the matrices of layer {layer} do not fit {width} query channels")
        if left.shape[1:] != (hidden,) if right is None else right.shape != (left.shape[1], hidden):
            raise ProfileError(f"damaged: the matrices of layer {layer} do not fit a hidden size of {hidden}")
        corrections[layer] = Correction(left, right, bias)
    return corrections


def channels_of(tensors: Mapping[str, torch.Tensor], shape: Shape) -> dict[int, torch.Tensor]:
    """Return the channel orders by layer. Raise ProfileError for a tensor that is not an order of all channels."""
    channels = {}
    for layer, order in _of_layers(tensors, "channels", shape):
        every = torch.arange(shape.head_dim).expand(shape.kv_heads, -1)
        if order.shape != every.shape or not torch.equal(order.to(torch.int64).sort(dim=1).values, every):
            raise ProfileError(
                f"damaged: the channels of layer {layer} must be an order of {shape.head_dim} channels for each of "
                f"{shape.kv_heads} KV heads"
            )
        channels[layer] = order.to(torch.int64)
    return channels


def skews_of(tensors: Mapping[str, torch.Tensor], shape: Shape) -> dict[int, torch.Tensor]:
    """Return the skews by layer. Raise ProfileError for a matrix that would change products of queries and keys."""
    skews = {}
    for layer, skew in _of_layers(tensors, "skew", shape):
        if skew.shape != (shape.kv_heads, shape.head_dim, shape.head_dim) or not _is_orthogonal(skew):
            raise ProfileError(
                f"damaged: the skew of layer {layer} must be an orthogonal matrix of {shape.head_dim} channels for "
                f"each of {shape.kv_heads} KV heads"
            )
        skews[layer] = skew.float()
    return skews


def steps_of(tensors: Mapping[str, torch.Tensor], shape: Shape) -> dict[int, torch.Tensor]:
    """Return the steps by layer. Raise ProfileError for steps by which nothing can be divided."""
    found = {}
    for layer, steps in _of_layers(tensors, "steps", shape):
        if steps.shape != (2, shape.kv_heads, shape.head_dim) or not _have_reciprocals(steps):
            raise ProfileError(
                f"damaged: the steps of layer {layer} must be positive and finite, for keys and values of "
                f"{shape.head_dim} channels for each of {shape.kv_heads} KV heads"
            )
        found[layer] = steps.float()
    return found


def _have_reciprocals(steps: torch.Tensor) -> bool:
    # 1 / tiny is finite, and smaller positive numbers may count as 0
    numbers = steps.float()
    return bool((numbers.isfinite() & (numbers >= torch.finfo(torch.float32).tiny)).all())


def _of_layers(tensors: Mapping[str, torch.Tensor], part: str, shape: Shape) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each layer that has a tensor called ``part``, with the tensor."""
    for layer in range(shape.layers):
        if (found := tensors.get(f"layers.{layer}.{part}")) is not None:
            yield layer, found


def _is_orthogonal(skew: torch.Tensor) -> bool:
    product = skew.float().transpose(1, 2) @ skew.float()
    return bool((product - torch.eye(skew.shape[1])).abs().max() < _ORTHOGONAL)
