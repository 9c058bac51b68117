"""Prediction in SGLang's forward pass: hooks in front of the decoder layers that look one layer ahead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.integration.decoder_layers import DecoderLayers, UnknownLayers
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.scout.predictor import Correction, QueryPredictor
from sglang_hybrid.scout.profile import ModelIdentity, Profile, ProfileError, load_profile

logger = logging.getLogger("sglang.srt.hybrid")

_SAMPLED_GAINS = 8

# layer id, predicted query [rows, query heads, head_dim], the layer's attention scale
Ahead = Callable[[int, torch.Tensor, float], None]


class Scouting:
    """The predictors of one model runner. At layer i it calls ``ahead`` for layer i + 1."""

    def __init__(self, model_runner: Any, ahead: Ahead) -> None:
        self._runner = model_runner
        self._ahead = ahead
        self._layers: DecoderLayers | None = None
        self._predictors: dict[int, QueryPredictor] = {}
        self._stop: Callable[[], None] | None = None

    def use(self, config: HybridConfig, profile: Profile | None) -> None:
        """Predict by these settings from now on. Raises Refusal where they ask for what this model cannot do."""
        if self._stop:
            self._stop()
            self._stop = None
        self._predictors = {}
        if config.policy != "scout" or config.prediction == "none":
            return
        if config.prediction == "auto" and profile is None:
            # raw predictions are fast and cost accuracy: nobody gets them without asking
            logger.info("queries are not predicted without a profile: sglang-hybrid profile makes one")
            return
        try:
            self._layers = self._layers or DecoderLayers(self._runner.model)
            weights = {layer: self._layers.query_weights(layer) for layer in self._layers.ids}
        except UnknownLayers as unknown:
            if config.prediction != "auto":
                raise Refusal(f"prediction={config.prediction}: {unknown}; serve it with prediction=none") from unknown
            logger.warning("queries are not predicted: %s; misses wait for the real query", unknown)
            return
        corrections = profile.corrections if profile and config.prediction != "raw" else {}
        for layer, of_layer in weights.items():
            # the first layer's query is computed from its own input: there is nothing to correct
            correction = corrections.get(layer) if layer != self._layers.ids[0] else None
            if correction is not None:
                correction = self._of_rank(correction, of_layer.projection)
            self._predictors[layer] = QueryPredictor(of_layer, correction)
        self._stop = self._layers.on_input(self._on_input)

    def _of_rank(self, correction: Correction, projection: torch.Tensor) -> Correction:
        width, rank = projection.shape[0], self._runner.ps.tp_rank
        part = slice(rank * width, (rank + 1) * width)
        own = Correction(correction.left[part], correction.right, correction.bias[part])
        return own.to(projection.device, projection.dtype)

    def _on_input(self, layer: int, inputs: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> None:
        if self._layers is None or not forward_batch.forward_mode.is_decode():
            return
        # The first layer has none before it, but these inputs are its own, so this is its real query. It is posted
        # before the second: the worker holds two posts, and a third would take the place of one not collected yet.
        announced = (layer, layer + 1) if layer == self._layers.ids[0] else (layer + 1,)
        for number in announced:
            if predictor := self._predictors.get(number):
                self._ahead(number, predictor.query(inputs, positions), self._layers.scale(number))


def read_profile(config: HybridConfig, model_runner: Any) -> Profile | None:
    """The profile that the configuration names. Raises Refusal for one that does not fit."""
    if config.policy != "scout" or config.profile == "none":
        return None
    try:
        profile = load_profile(Path(config.profile))
        profile.check(identity(model_runner), config.block_tokens, config.budget_tokens)
    except ProfileError as error:
        raise Refusal(
            str(error) if str(error).startswith("profile ") else f"profile {config.profile}: {error}"
        ) from error
    return profile


def identity(model_runner: Any) -> ModelIdentity:
    """Raises ProfileError for a model that profiles cannot be made of."""
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
