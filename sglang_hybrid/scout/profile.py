"""The profile: what ``sglang-hybrid profile`` found out about one model at one budget on one host.

One file in the safetensors format, so nothing in it can run: the predictor's matrices as tensors, everything else as
JSON in the file's metadata.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_hybrid.scout.predictor import Correction

VERSION = 1
_KEY = "sglang_hybrid_profile"

# Weights lose digits when a model is loaded in another dtype; another model's differ by much more.
_SAME_WEIGHTS = 0.02


class ProfileError(Exception):
    """A profile that cannot be used. Says why, with both values where two do not agree."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model a profile is of. Whole model, not one rank's part."""

    architecture: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    weights: list[float]  # a few gains of the first and the last norm: fine-tuned siblings differ in nothing else


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Mean CPU compute ratio over decode steps, per layer: ``ratios[layer][step]``."""

    name: str
    ratios: list[list[float]]

    def mean(self) -> list[float]:
        return [sum(step) / len(step) for step in zip(*self.ratios, strict=True)]


class HostRates(msgspec.Struct, frozen=True, kw_only=True):
    """Measured on the host that the profile was made on."""

    cpu: str
    threads: int
    read_gb_s: float
    attention_gb_s: float  # block attention by the CPU kernels
    transfer_gb_s: float | None = None  # copies over PCIe, a bound for the gather; null without a GPU


class ProfileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All of a profile but the matrices. Lists have one value per layer."""

    version: int = VERSION
    model: ModelIdentity
    block_tokens: int
    budget_tokens: int
    beta: float
    intervals: list[int]
    bonus: list[float]
    miss_shares: list[float] = []  # empty in profiles that are older than this list
    ranks: list[int]  # of the correction; 0: none (the first layer), hidden: full
    cosine_raw: list[float]
    cosine_calibrated: list[float]
    block_change: list[float]  # part of the selection that is new at each step
    curves: list[Curve]
    rates: HostRates
    notes: dict[str, Any]  # command, date, texts, tokens


class Profile:
    def __init__(
        self,
        facts: ProfileFacts,
        corrections: dict[int, Correction],
        channels: dict[int, torch.Tensor] | None = None,
    ) -> None:
        self.facts = facts
        self.corrections = corrections  # by layer; the first layer has none
        self.channels = channels or {}  # by layer [KV heads, head_dim]: channels of keys, the most telling first

    def with_facts(self, **changes: Any) -> Profile:
        return Profile(msgspec.structs.replace(self.facts, **changes), self.corrections, self.channels)

    @property
    def bonus(self) -> tuple[float, ...]:
        return tuple(self.facts.bonus)

    @property
    def intervals(self) -> tuple[int, ...]:
        return tuple(self.facts.intervals)

    @property
    def miss_shares(self) -> tuple[float, ...]:
        return tuple(self.facts.miss_shares)

    def save(self, path: Path) -> None:
        """Complete or not at all: an interrupted write leaves what was there before."""
        tensors = {}
        for layer, correction in self.corrections.items():
            tensors[f"layers.{layer}.left"] = correction.left.contiguous()
            tensors[f"layers.{layer}.bias"] = correction.bias.contiguous()
            if correction.right is not None:
                tensors[f"layers.{layer}.right"] = correction.right.contiguous()
        for layer, order in self.channels.items():
            tensors[f"layers.{layer}.channels"] = order.to(torch.uint8).contiguous()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        save_file(tensors, part, metadata={_KEY: msgspec.json.encode(self.facts).decode()})
        os.replace(part, path)

    def check(self, model: ModelIdentity, block_tokens: int, budget_tokens: int) -> None:
        """Raise ProfileError unless this profile was made for that."""
        made, wrong = self.facts, []
        for field in msgspec.structs.fields(ModelIdentity):
            of_profile, of_model = getattr(made.model, field.name), getattr(model, field.name)
            if field.name == "weights":
                if differ := _other_weights(of_profile, of_model):
                    wrong.append(f"weights: profile of a model whose norms have {differ[0]}, served {differ[1]}")
            elif of_profile != of_model:
                wrong.append(f"{field.name}: profile {of_profile}, served {of_model}")
        if made.block_tokens != block_tokens:
            wrong.append(f"block_tokens: profile {made.block_tokens}, served {block_tokens}")
        if made.budget_tokens != budget_tokens:
            wrong.append(f"budget_tokens: profile {made.budget_tokens}, served {budget_tokens}")
        if wrong:
            raise ProfileError("made for something else: " + "; ".join(wrong))


def _other_weights(a: list[float], b: list[float]) -> tuple[str, str] | None:
    """The first two that differ by more than a dtype does, or how many there are."""
    if len(a) != len(b):
        return f"{len(a)} sampled gains", f"{len(b)}"
    for x, y in zip(a, b, strict=True):
        if not abs(x - y) <= _SAME_WEIGHTS * max(abs(x), abs(y), 0.01):
            return f"{x:.4f}", f"{y:.4f}"
    return None


def load_profile(path: Path) -> Profile:
    """Raises ProfileError, which names the file."""
    try:
        return _load(path)
    except ProfileError as error:
        raise ProfileError(f"profile {path}: {error}") from error


def _load(path: Path) -> Profile:
    if not path.is_file():
        raise ProfileError("there is no such file; sglang-hybrid profile makes one")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            if text is None:
                raise ProfileError("not a profile: a safetensors file without our metadata")
            _check_version(text)
            facts = msgspec.json.decode(text, type=ProfileFacts)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise ProfileError(f"cannot be read: {error}") from error
    layers = facts.model.layers
    lists = ["intervals", "bonus", "ranks", "cosine_raw", "cosine_calibrated", "block_change"]
    lists += ["miss_shares"] if facts.miss_shares else []
    if short := [name for name in lists if len(getattr(facts, name)) != layers]:
        raise ProfileError(f"damaged: {', '.join(short)} must have one value for each of {layers} layers")
    corrections = {}
    width = facts.model.query_heads * facts.model.head_dim
    for layer in range(1, layers):
        left, right, bias = (tensors.get(f"layers.{layer}.{part}") for part in ("left", "right", "bias"))
        if left is None and bias is None:
            continue
        if left is None or bias is None or bias.shape != (width,) or left.ndim != 2 or left.shape[0] != width:
            raise ProfileError(f"damaged: the matrices of layer {layer} do not fit {width} query channels")
        hidden = facts.model.hidden
        if left.shape[1:] != (hidden,) if right is None else right.shape != (left.shape[1], hidden):
            raise ProfileError(f"damaged: the matrices of layer {layer} do not fit a hidden size of {hidden}")
        corrections[layer] = Correction(left, right, bias)
    return Profile(facts, corrections, _channels(tensors, facts.model))


def _channels(tensors: dict[str, torch.Tensor], model: ModelIdentity) -> dict[int, torch.Tensor]:
    channels = {}
    for layer in range(model.layers):
        order = tensors.get(f"layers.{layer}.channels")
        if order is None:
            continue
        every = torch.arange(model.head_dim).expand(model.kv_heads, -1)
        if order.shape != every.shape or not torch.equal(order.to(torch.int64).sort(dim=1).values, every):
            raise ProfileError(
                f"damaged: the channels of layer {layer} must be an order of {model.head_dim} channels for each of "
                f"{model.kv_heads} KV heads"
            )
        channels[layer] = order.to(torch.int64)
    return channels


def _check_version(text: str) -> None:
    class Head(msgspec.Struct):
        version: int

    version = msgspec.json.decode(text, type=Head).version
    if version != VERSION:
        raise ProfileError(f"has format version {version}, this release reads {VERSION}; make it anew")
