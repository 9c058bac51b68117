"""Prediction in SGLang's forward pass: hooks in front of the decoder layers that look one layer ahead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.gpu.decode import DeviceScout
from sglang_hybrid.gpu.predicting import DevicePredictor, PredictionBuffers
from sglang_hybrid.integration.decoder_layers import DecoderLayers, UnknownLayers
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.scout.predictor import Correction, QueryPredictor, QueryWeights
from sglang_hybrid.scout.profile import ModelIdentity, Profile, ProfileError, load_profile

logger = logging.getLogger("sglang.srt.hybrid")

_SAMPLED_GAINS = 8

# layer id, predicted query [rows, query heads, head_dim], the layer's attention scale
Ahead = Callable[[int, torch.Tensor, float], None]


class Scouting:
    """The predictors of one model runner. At layer i it calls ``ahead`` for layer i + 1."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._layers: DecoderLayers | None = None
        self._predictors: dict[int, Any] = {}
        self._stop: Callable[[], None] | None = None

    @property
    def is_predicting(self) -> bool:
        return self._stop is not None

    def use(self, config: HybridConfig, profile: Profile | None, ahead: Ahead | DeviceScout) -> None:
        """Predict by these settings from now on, and tell ``ahead``, which may be a device whose lanes do it.

        Raises Refusal where settings ask for what this model cannot do.
        """
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
            refuse_inputs(self._runner.server_args)
            self._layers = self._layers or DecoderLayers(self._runner.model)
            weights = {layer: self._layers.query_weights(layer) for layer in self._layers.ids}
        except UnknownLayers as unknown:
            if config.prediction != "auto":
                raise Refusal(f"prediction={config.prediction}: {unknown}; serve it with prediction=none") from unknown
            logger.warning("queries are not predicted: %s; misses wait for the real query", unknown)
            return
        corrections = profile.corrections if profile and config.prediction != "raw" else {}
        buffers: list[PredictionBuffers] = []
        if isinstance(ahead, DeviceScout):
            # the queries of two layers can be on their way at a time
            buffers = [_prediction_buffers(ahead.most, weights, corrections) for _ in range(2)]
        for layer, of_layer in weights.items():
            # the first layer's query is computed from its own input: there is nothing to correct
            correction = corrections.get(layer) if layer != self._layers.ids[0] else None
            if correction is not None:
                correction = self._of_rank(correction, of_layer.projection)
            if isinstance(ahead, DeviceScout):
                self._predictors[layer] = DevicePredictor(
                    of_layer, correction, max_batch=ahead.most, buffers=buffers[layer % 2]
                )
            else:
                self._predictors[layer] = QueryPredictor(of_layer, correction)
        if isinstance(ahead, DeviceScout):
            self._stop = self._layers.on_parts(partial(self._on_parts, ahead))
        else:
            self._stop = self._layers.on_input(partial(self._on_input, ahead))

    def _of_rank(self, correction: Correction, projection: torch.Tensor) -> Correction:
        width, rank = projection.shape[0], self._runner.ps.tp_rank
        part = slice(rank * width, (rank + 1) * width)
        own = Correction(correction.left[part], correction.right, correction.bias[part])
        return own.to(projection.device, projection.dtype)

    def _announced(self, layer: int) -> list[int]:
        """Whose queries the input of ``layer`` tells.

        The first layer has none before it, but these inputs are its own, so this is its real query. It is posted
        before the second: the worker holds two posts, and a third would take the place of one not collected yet.
        """
        assert self._layers is not None
        numbers = (layer, layer + 1) if layer == self._layers.ids[0] else (layer + 1,)
        return [number for number in numbers if number in self._predictors]

    def _on_input(
        self, ahead: Ahead, layer: int, inputs: torch.Tensor, positions: torch.Tensor, forward_batch: Any
    ) -> None:
        if self._layers is None or not forward_batch.forward_mode.is_decode():
            return
        for number in self._announced(layer):
            ahead(number, self._predictors[number].query(inputs, positions), self._layers.scale(number))

    def _on_parts(
        self,
        device: DeviceScout,
        layer: int,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        forward_batch: Any,
    ) -> None:
        if self._layers is None or device.is_dense or not forward_batch.forward_mode.is_decode():
            return
        announced, count, first = self._announced(layer), hidden.shape[0], self._layers.ids[0]
        if not announced:
            return
        for number in announced:  # on the main lane: the layer changes these inputs in place
            self._predictors[number].prepare(hidden, residual)
        with device.scout_lane():
            for number in announced:
                index = number - first
                self._predictors[number].finish(positions, device.query_ahead(index, count))
                device.ahead(index, count, self._layers.scale(number))


def refuse_inputs(args: Any) -> None:
    """Raise UnknownLayers where what the hooks read is not what makes the query."""
    if args.enable_lora or args.lora_paths:
        raise UnknownLayers("LoRA adapters change queries, and predictions are made from the model's own weights")
    fused = ("enable_flashinfer_allreduce_fusion", "enable_aiter_allreduce_fusion")
    if args.tp_size > 1 and any(getattr(args, flag, False) for flag in fused):
        raise UnknownLayers(
            "layers get a rank's part of their input before it is summed: start with "
            "--enforce-disable-flashinfer-allreduce-fusion"
        )


def _prediction_buffers(
    most: int, weights: dict[int, QueryWeights], corrections: dict[int, Correction]
) -> PredictionBuffers:
    projection = next(iter(weights.values())).projection
    ranks = [correction.right.shape[0] for correction in corrections.values() if correction.right is not None]
    width, hidden = projection.shape
    return PredictionBuffers(most, hidden, width, max(ranks, default=0), projection.dtype, projection.device)


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
