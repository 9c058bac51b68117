"""What a server fits at its start, fitted on a plain model: predictors, channels of sketches, steps of codes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.attended.plain_model import PlainModel, Shape, causal
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.policies.scout.calibration_text import CalibrationText, calibration_text
from sglang_hybrid.policies.scout.channel_spread import ChannelSpread
from sglang_hybrid.policies.scout.code_steps import CodeSteps
from sglang_hybrid.policies.scout.fit_predictor import Calibrator
from sglang_hybrid.policies.scout.predictor import QueryPredictor
from sglang_hybrid.policies.scout.special_tokens import special_windows


@dataclass(frozen=True)
class Calibrated:
    """What is known about each layer."""

    predictors: dict[int, QueryPredictor]  # of all layers but the first
    channels: list[torch.Tensor]  # [KV heads, C]: in the sketch
    steps: list[torch.Tensor]  # [2, KV heads, dim]: of codes of keys and of values
    cosine: float  # of predicted with real queries of unseen text, the mean of all layers


def made_text(model: Path, shape: Shape) -> CalibrationText:
    """Return the text that a server calibrates on, in tokens of the tokenizer in the directory ``model``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = calibration_text(lambda text: tokenizer.encode(text, add_special_tokens=False), shape.hidden, shape.context)
    return dataclasses.replace(text, special=special_windows(tokenizer, shape.context))


def write_text(path: Path, text: CalibrationText) -> None:
    path.write_text(json.dumps(dataclasses.asdict(text)) + "\n")


def read_text(path: Path) -> CalibrationText:
    parts = json.loads(path.read_text())
    return CalibrationText(**{name: tuple(map(tuple, windows)) for name, windows in parts.items()})


def calibrate(model: PlainModel, text: CalibrationText, config: HybridConfig) -> Calibrated:
    """Fit everything on ``text``, as ``sglang_hybrid.integration.calibrate`` does in a server."""
    shape, device = model.shape, model.device
    weights = {layer: model.query_weights(layer) for layer in range(shape.layers)}
    calibrator = Calibrator(weights)
    spreads = [ChannelSpread(shape.head_dim, neox=True) for _ in weights]
    sizes = [CodeSteps(shape.head_dim, neox=True) for _ in weights]

    def inputs_of(window: Sequence[int], measures_spread: bool) -> dict[int, torch.Tensor]:
        seen = {}

        def attend(
            layer: int, inputs: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            seen[layer] = inputs
            sizes[layer].add(keys, values)
            if measures_spread:
                spreads[layer].add(queries, keys)
            return causal(queries, keys.transpose(0, 1), values.transpose(0, 1), shape.scale)

        model.forward(window, 0, attend)
        return seen

    for window in text.fit:
        calibrator.add(inputs_of(window, measures_spread=True))
    unseen = [inputs_of(window, measures_spread=False) for window in text.unseen]
    for window in text.special:
        inputs_of(window, measures_spread=False)
    fitted = calibrator.calibrate(unseen, "auto")
    return Calibrated(
        {
            layer: QueryPredictor(weights[layer], of_layer.correction.to(device, model.dtype))
            for layer, of_layer in fitted.items()
        },
        [spread.order()[:, : config.sketch_channels].to(device) for spread in spreads],
        [size.steps().to(device) for size in sizes],
        sum(of_layer.cosine for of_layer in fitted.values()) / max(1, len(fitted)),
    )
