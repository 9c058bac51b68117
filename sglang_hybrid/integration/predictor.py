"""Predict queries in SGLang's forward pass: hooks in front of the decoder layers look one layer ahead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.base import Engine, LayerPrediction
from sglang_hybrid.engines.first_steps import SplitStep
from sglang_hybrid.integration.calibrate import refuse_inputs
from sglang_hybrid.integration.decoder_layers import DecoderLayers, UnknownLayers
from sglang_hybrid.integration.ranks import rank_of
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.policies.registry import policy_named, prediction_of
from sglang_hybrid.policies.scout.corrections_file import Calibrated
from sglang_hybrid.policies.scout.predictor import Correction
from sglang_hybrid.policies.scout.profile import ModelIdentity, Profile, ProfileError, load_profile

logger = logging.getLogger("sglang.srt.hybrid")

_SAMPLED_GAINS = 8


class Scouting:
    """Query prediction of one model runner: at layer i the engine gets the input that predicts layer i + 1's query."""

    def __init__(self, model_runner: Any, split: Callable[[], SplitStep | None] = lambda: None) -> None:
        """``split`` returns the running step's ``SplitStep`` or None. Rows in first steps need no prediction."""
        self._runner = model_runner
        self._split = split
        self._layers: DecoderLayers | None = None
        self._predicted: set[int] = set()  # layer ids
        self._stop: Callable[[], None] | None = None
        self.prediction = "none"  # calibrated, raw or none: what is in use now

    @property
    def is_predicting(self) -> bool:
        return self._stop is not None

    def use(self, config: HybridConfig, calibrated: Calibrated | None, engine: Engine) -> None:
        """Predict with these settings from now on, for ``engine``. ``calibrated`` is a profile or a calibration.

        Raise Refusal if the settings require a prediction that the model does not allow.
        """
        if self._stop:
            self._stop()
            self._stop = None
        predictions = self._predictions(config, calibrated) if engine.predicts else {}
        self._predicted = set(predictions)
        self.prediction = prediction_of(config, is_calibrated=calibrated is not None) if predictions else "none"
        first = min(predictions, default=0)
        engine.set_predictors({layer - first: given for layer, given in predictions.items()})
        if predictions and self._layers is not None:
            self._stop = self._layers.on_parts(partial(self._on_parts, engine))

    def _predictions(self, config: HybridConfig, calibrated: Calibrated | None) -> dict[int, LayerPrediction]:
        """Return what predicts each layer's query, by layer id; empty if nothing is predicted."""
        prediction = prediction_of(config, is_calibrated=calibrated is not None)
        if prediction == "none":
            if config.prediction == "auto" and policy_named(config.policy).needs.prediction:
                logger.info("queries are not predicted; profile=auto fits a predictor when the server starts")
            return {}
        try:
            refuse_inputs(self._runner.server_args)
            self._layers = DecoderLayers(self._runner.model)  # created anew: weights may have been updated
            weights = {layer: self._layers.query_weights(layer) for layer in self._layers.ids}
        except UnknownLayers as unknown:
            if config.prediction != "auto":
                raise Refusal(f"prediction={config.prediction}: {unknown}; serve it with prediction=none") from unknown
            logger.warning("queries are not predicted: %s; misses wait for the real query", unknown)
            return {}
        corrections = calibrated.corrections if calibrated and prediction == "calibrated" else {}
        predictions = {}
        for layer, of_layer in weights.items():
            # the first layer's query is computed from its own input: there is nothing to correct
            correction = corrections.get(layer) if layer != self._layers.ids[0] else None
            if correction is not None:
                correction = self._of_rank(correction, of_layer.projection)
            scale = self._layers.scale(layer, self._runner.token_to_kv_pool.dtype)
            predictions[layer] = LayerPrediction(of_layer, correction, scale)
        return predictions

    def _of_rank(self, correction: Correction, projection: torch.Tensor) -> Correction:
        """Return this rank's part of ``correction``. A calibration holds only this part, a profile the whole model."""
        width, rank = projection.shape[0], rank_of(self._runner).rank
        part = slice(rank * width, (rank + 1) * width) if correction.left.shape[0] != width else slice(None)
        own = Correction(correction.left[part], correction.right, correction.bias[part])
        return own.to(projection.device, projection.dtype)

    def _announced(self, layer: int) -> list[int]:
        """Return the layers whose queries are computed from the input of ``layer``.

        No layer comes before the first one, but this input is its own, so its query is the real one. The first layer is
        posted before the second: the worker holds two posts, and a third would overwrite one that is not collected yet.
        """
        assert self._layers is not None
        numbers = (layer, layer + 1) if layer == self._layers.ids[0] else (layer + 1,)
        return [number for number in numbers if number in self._predicted]

    def _on_parts(
        self,
        engine: Engine,
        layer: int,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        forward_batch: Any,
    ) -> None:
        if self._layers is None or not forward_batch.forward_mode.is_decode():
            return
        first = self._layers.ids[0]
        announced = [number - first for number in self._announced(layer)]
        split = self._split()
        if split is not None:
            hidden, positions = split.of_others(hidden), split.of_others(positions)
            residual = None if residual is None else split.of_others(residual)
        if announced and len(hidden):
            engine.ahead(announced, hidden, residual, positions)


def read_profile(config: HybridConfig, model_runner: Any) -> Profile | None:
    """Return the profile that the configuration names, None if it needs none. Raise Refusal if it does not fit."""
    if not policy_named(config.policy).needs.prediction or config.profile_file is None:
        return None
    try:
        profile = load_profile(Path(config.profile_file))
        profile.check(identity(model_runner), BLOCK_TOKENS, config.budget_tokens)
    except ProfileError as error:
        raise Refusal(
            str(error) if str(error).startswith("profile ") else f"profile {config.profile}: {error}"
        ) from error
    return profile


def identity(model_runner: Any) -> ModelIdentity:
    """Return which model is served, as profiles name it. Raise ProfileError if its queries cannot be predicted."""
    config = model_runner.model_config
    try:
        layers = DecoderLayers(model_runner.model)
        norms = [layers.query_weights(layer).norm for layer in (layers.ids[0], layers.ids[-1])]
    except UnknownLayers as unknown:
        raise ProfileError(f"profiles need predictable queries, but {unknown}") from unknown
    return ModelIdentity(
        architecture=config.hf_config.architectures[0],
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        query_heads=config.num_attention_heads,
        kv_heads=config.get_total_num_kv_heads(),
        head_dim=config.head_dim,
        weights=[round(float(gain), 5) for norm in norms for gain in norm[:_SAMPLED_GAINS]],
    )
