"""The metadata of a profile, readable without torch, so that a launcher can refuse a wrong profile at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sglang_hybrid.safetensors_header import read_metadata

VERSION = 1
METADATA_KEY = "sglang_hybrid_profile"

# Relative tolerance. Weights lose digits when a model is loaded in another dtype; another model's differ by much more.
_SAME_WEIGHTS = 0.02


class ProfileError(Exception):
    """A profile cannot be used. The message says why, with both values if two differ."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that a profile was made for: the whole model, not one rank's part."""

    architecture: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    weights: list[float]  # a few gains of the first and the last norm: fine-tuned siblings differ in nothing else


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Mean CPU compute ratio of each layer at each decode step: ``ratios[layer][step]``."""

    name: str
    ratios: list[list[float]]

    def mean(self) -> list[float]:
        return [sum(step) / len(step) for step in zip(*self.ratios, strict=True)]


class HostRates(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds that were measured on the host that made the profile."""

    cpu: str
    threads: int
    read_gb_s: float
    attention_gb_s: float  # block attention by the CPU kernels
    transfer_gb_s: float | None = None  # copies over PCIe, a bound for the gather; null without a GPU


class ProfileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All of a profile except the matrices. Lists have one value per layer."""

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
    block_change: list[float]  # share of the selection that is new at each step
    curves: list[Curve]
    rates: HostRates
    notes: dict[str, Any]  # command, date, texts, tokens


def read_facts(path: Path) -> ProfileFacts:
    """Read the facts from the header of a profile. Raise ProfileError if that fails."""
    if not path.is_file():
        raise ProfileError("there is no such file; sglang-hybrid profile makes one")
    try:
        return facts_of(read_metadata(path))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ProfileError(f"cannot be read: {error}") from error


def facts_of(metadata: Mapping[str, str] | None) -> ProfileFacts:
    """Decode the facts in a file's metadata. Raise ProfileError or msgspec.MsgspecError if they are not valid."""
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        raise ProfileError("not a profile: a safetensors file without our metadata")
    _check_version(text)
    return msgspec.json.decode(text, type=ProfileFacts)


def mismatches(facts: ProfileFacts, model: Mapping[str, Any], block_tokens: int, budget_tokens: int) -> list[str]:
    """Return, in words, where profile and served model differ. ``model``: fields of ModelIdentity that are known."""
    wrong = other_model("profile", facts.model, model)
    if facts.block_tokens != block_tokens:
        wrong.append(f"block_tokens: profile {facts.block_tokens}, served {block_tokens}")
    if facts.budget_tokens != budget_tokens:
        wrong.append(f"budget_tokens: profile {facts.budget_tokens}, served {budget_tokens}")
    return wrong


def other_model(file: str, made_for: ModelIdentity, served: Mapping[str, Any]) -> list[str]:
    """Return, in words, how a served model differs from that of a file. ``file``: kind of file, such as "profile"."""
    wrong = []
    for name, of_model in served.items():
        of_file = getattr(made_for, name)
        if name == "weights":
            if differ := _other_weights(of_file, of_model):
                wrong.append(f"weights: {file} of a model whose norms have {differ[0]}, served {differ[1]}")
        elif of_file != of_model:
            wrong.append(f"{name}: {file} {of_file}, served {of_model}")
    return wrong


def _other_weights(a: list[float], b: list[float]) -> tuple[str, str] | None:
    """Return the first two weights that differ by more than a dtype does, or both counts if these differ; else None."""
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
