"""The profile: what ``sglang-hybrid profile`` fitted and measured for one model at one budget on one host.

A profile is one file in the safetensors format, which contains nothing that can run: the predictor's matrices are
tensors, everything else is JSON in the file's metadata.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_hybrid.policies.scout.corrections_file import (
    Shape,
    channels_of,
    corrections_of,
    skews_of,
    steps_of,
    to_tensors,
)
from sglang_hybrid.policies.scout.predictor import Correction
from sglang_hybrid.policies.scout.profile_facts import (
    METADATA_KEY,
    VERSION,
    Curve,
    HostRates,
    ModelIdentity,
    ProfileError,
    ProfileFacts,
    facts_of,
    mismatches,
)

__all__ = ["VERSION", "Curve", "HostRates", "ModelIdentity", "Profile", "ProfileError", "ProfileFacts", "load_profile"]


class Profile:
    def __init__(
        self,
        facts: ProfileFacts,
        corrections: dict[int, Correction],
        channels: dict[int, torch.Tensor] | None = None,
        skews: dict[int, torch.Tensor] | None = None,
        steps: dict[int, torch.Tensor] | None = None,
    ) -> None:
        self.facts = facts
        self.corrections = corrections  # by layer; the first layer has none
        self.channels = channels or {}  # by layer [KV heads, head_dim]: channels of keys, most informative first
        self.skews = skews or {}  # by layer [KV heads, head_dim, head_dim]: see infinigen.skew; old profiles lack it
        self.steps = steps or {}  # by layer [2, KV heads, head_dim]: see code_steps; old profiles lack them

    def with_facts(self, **changes: Any) -> Profile:
        facts = msgspec.structs.replace(self.facts, **changes)
        return Profile(facts, self.corrections, self.channels, self.skews, self.steps)

    @property
    def bonus(self) -> tuple[float, ...]:
        return tuple(self.facts.bonus)

    @property
    def intervals(self) -> tuple[int, ...]:
        return tuple(self.facts.intervals)

    @property
    def miss_shares(self) -> tuple[float, ...]:
        return tuple(self.facts.miss_shares)

    @property
    def cosines(self) -> dict[int, float]:
        return {layer: self.facts.cosine_calibrated[layer] for layer in self.corrections}

    def save(self, path: Path) -> None:
        """Write the file atomically: an interrupted write leaves the previous file as it was."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        save_file(to_tensors(self), part, metadata={METADATA_KEY: msgspec.json.encode(self.facts).decode()})
        os.replace(part, path)

    def check(self, model: ModelIdentity, block_tokens: int, budget_tokens: int) -> None:
        """Raise ProfileError unless this profile was made for this model, block size and budget."""
        of_model = msgspec.structs.asdict(model)
        if wrong := mismatches(self.facts, of_model, block_tokens, budget_tokens):
            raise ProfileError("made for something else: " + "; ".join(wrong))


def load_profile(path: Path) -> Profile:
    """Read a profile. Raise ProfileError, which names the file, if it is missing or damaged."""
    try:
        return _load(path)
    except ProfileError as error:
        raise ProfileError(f"profile {path}: {error}") from error


def _load(path: Path) -> Profile:
    if not path.is_file():
        raise ProfileError("there is no such file; sglang-hybrid profile makes one")
    try:
        with safe_open(path, framework="pt") as file:
            facts = facts_of(file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise ProfileError(f"cannot be read: {error}") from error
    layers = facts.model.layers
    lists = ["intervals", "bonus", "ranks", "cosine_raw", "cosine_calibrated", "block_change"]
    lists += ["miss_shares"] if facts.miss_shares else []
    if short := [name for name in lists if len(getattr(facts, name)) != layers]:
        raise ProfileError(f"damaged: {', '.join(short)} must have one value for each of {layers} layers")
    model = facts.model
    shape = Shape(layers, model.hidden, model.query_heads, model.kv_heads, model.head_dim)
    return Profile(
        facts,
        corrections_of(tensors, shape),
        channels_of(tensors, shape),
        skews_of(tensors, shape),
        steps_of(tensors, shape),
    )
