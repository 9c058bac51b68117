"""The calibration that a server fits at its first start with a model, as a file for later starts.

Each rank has one file in the safetensors format, which contains nothing that can run. The file's name is its key: with
another model, other weights, another dtype, another split over ranks or another ``FORMAT`` the name differs, and the
server fits anew.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

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
from sglang_hybrid.policies.scout.fit_predictor import LayerCalibration
from sglang_hybrid.policies.scout.predictor import Correction
from sglang_hybrid.policies.scout.profile_facts import ProfileError

# Raise this number with every change of the file, of the text that is fitted on, or of the way of fitting.
FORMAT = 4
_METADATA_KEY = "sglang_hybrid_calibration"


@dataclass(frozen=True)
class CalibrationKey:
    """The model and rank that a calibration was fitted for. ``shape`` is that of one rank."""

    architecture: str
    weights: str  # fingerprint, hexadecimal
    dtype: str
    ranks: int
    rank: int
    shape: Shape

    @property
    def file_name(self) -> str:
        parts = (self.architecture, self.weights[:16], self.dtype, f"tp{self.ranks}", f"rank{self.rank}", f"v{FORMAT}")
        return re.sub(r"[^A-Za-z0-9_.-]", "_", "-".join(parts)) + ".safetensors"


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a calibration file, by layer."""

    ranks: dict[int, int]
    cosine_raw: dict[int, float]
    cosine: dict[int, float]


@dataclass(frozen=True)
class Calibration:
    """The predictor of all layers of one rank, the order of the keys' channels, their skew, and steps of codes."""

    layers: dict[int, LayerCalibration]  # without the first layer, whose query is never predicted
    channels: dict[int, torch.Tensor]
    skews: dict[int, torch.Tensor] = field(default_factory=dict)
    steps: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def corrections(self) -> dict[int, Correction]:
        return {layer: one.correction for layer, one in self.layers.items()}

    @property
    def cosines(self) -> dict[int, float]:
        return {layer: one.cosine for layer, one in self.layers.items()}

    def summary(self) -> str:
        """Return a sentence about the cosines of predicted and real queries."""
        if not self.layers:
            return "there is only one layer, nothing to predict"
        raw, reached = ([getattr(one, name) for one in self.layers.values()] for name in ("cosine_raw", "cosine"))
        return (
            f"cosine of predicted and real queries {sum(reached) / len(reached):.3f} (worst layer {min(reached):.3f}), "
            f"without calibration {sum(raw) / len(raw):.3f} (worst layer {min(raw):.3f})"
        )

    def save(self, path: Path) -> None:
        """Write the file atomically. Raise OSError if that fails."""
        facts = _Facts(
            ranks={layer: one.rank for layer, one in self.layers.items()},
            cosine_raw={layer: one.cosine_raw for layer, one in self.layers.items()},
            cosine={layer: one.cosine for layer, one in self.layers.items()},
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")  # each of several starting servers writes its own
        try:
            save_file(to_tensors(self), part, metadata={_METADATA_KEY: msgspec.json.encode(facts).decode()})
            os.replace(part, path)
        except SafetensorError as error:  # such as a full disk
            raise OSError(str(error)) from error
        finally:
            part.unlink(missing_ok=True)


def load_calibration(path: Path, key: CalibrationKey) -> Calibration | None:
    """Return the calibration in ``path``; None if there is no such file. Raise ProfileError for a damaged file."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            facts = msgspec.json.decode((file.metadata() or {})[_METADATA_KEY], type=_Facts)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, SafetensorError, msgspec.MsgspecError) as error:
        raise ProfileError(f"cannot be read: {error}") from error
    corrections = corrections_of(tensors, key.shape)
    if not set(corrections) == set(facts.ranks) == set(facts.cosine_raw) == set(facts.cosine):
        raise ProfileError("damaged: matrices and facts are of different layers")
    layers = {
        layer: LayerCalibration(correction, facts.ranks[layer], facts.cosine_raw[layer], facts.cosine[layer])
        for layer, correction in corrections.items()
    }
    return Calibration(
        layers, channels_of(tensors, key.shape), skews_of(tensors, key.shape), steps_of(tensors, key.shape)
    )
