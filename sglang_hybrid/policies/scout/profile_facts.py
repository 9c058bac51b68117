"""What a profile says besides its matrices, readable without torch: a launcher refuses a wrong profile at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

VERSION = 1
METADATA_KEY = "sglang_hybrid_profile"

# Weights lose digits when a model is loaded in another dtype; another model's differ by much more.
_SAME_WEIGHTS = 0.02
_LONGEST_HEADER = 100 << 20  # bytes, the safetensors format's own limit


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


def read_facts(path: Path) -> ProfileFacts:
    """From the header of the file alone. Raises ProfileError."""
    if not path.is_file():
        raise ProfileError("there is no such file; sglang-hybrid profile makes one")
    try:
        with path.open("rb") as file:
            # the safetensors format: eight bytes with the length of a JSON object, then that object, then the tensors
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST_HEADER:
                raise ProfileError("cannot be read: not a safetensors file")
            header = json.loads(file.read(length))
        return facts_of(header.get("__metadata__"))
    except (OSError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise ProfileError(f"cannot be read: {error}") from error


def facts_of(metadata: Mapping[str, str] | None) -> ProfileFacts:
    """Raises ProfileError or msgspec.MsgspecError."""
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        raise ProfileError("not a profile: a safetensors file without our metadata")
    _check_version(text)
    return msgspec.json.decode(text, type=ProfileFacts)


def mismatches(facts: ProfileFacts, model: Mapping[str, Any], block_tokens: int, budget_tokens: int) -> list[str]:
    """What the profile was made for and is not served, in words. ``model``: fields of ModelIdentity that are known."""
    wrong = []
    for name, of_model in model.items():
        of_profile = getattr(facts.model, name)
        if name == "weights":
            if differ := _other_weights(of_profile, of_model):
                wrong.append(f"weights: profile of a model whose norms have {differ[0]}, served {differ[1]}")
        elif of_profile != of_model:
            wrong.append(f"{name}: profile {of_profile}, served {of_model}")
    if facts.block_tokens != block_tokens:
        wrong.append(f"block_tokens: profile {facts.block_tokens}, served {block_tokens}")
    if facts.budget_tokens != budget_tokens:
        wrong.append(f"budget_tokens: profile {facts.budget_tokens}, served {budget_tokens}")
    return wrong


def _other_weights(a: list[float], b: list[float]) -> tuple[str, str] | None:
    """The first two that differ by more than a dtype does, or how many there are."""
    if len(a) != len(b):
        return f"{len(a)} sampled gains", f"{len(b)}"
    for x, y in zip(a, b, strict=True):
        if not abs(x - y) <= _SAME_WEIGHTS * max(abs(x), abs(y), 0.01):
            return f"{x:.4f}", f"{y:.4f}"
    return None


def _check_version(text: str) -> None:
    class Head(msgspec.Struct):
        version: int

    version = msgspec.json.decode(text, type=Head).version
    if version != VERSION:
        raise ProfileError(f"has format version {version}, this release reads {VERSION}; make it anew")
