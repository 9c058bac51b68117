"""Fit the query predictor while a server starts: run a text through the loaded model and regress on layers' inputs.

A group of a few layers is fitted at a time, because the sums of one layer take hundreds of megabytes in wide models.
Each group runs the text again, up to the group's last layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sglang_hybrid import container
from sglang_hybrid.integration.causal_forward import Attended, run_text
from sglang_hybrid.integration.decoder_layers import DecoderLayers, UnknownLayers
from sglang_hybrid.integration.ranks import smallest_of_ranks
from sglang_hybrid.policies.infinigen.skew import SkewSample
from sglang_hybrid.policies.scout.calibration import LayerFit
from sglang_hybrid.policies.scout.calibration_file import Calibration
from sglang_hybrid.policies.scout.calibration_text import CalibrationText, calibration_text, without_tokenizer
from sglang_hybrid.policies.scout.channel_spread import ChannelSpread
from sglang_hybrid.policies.scout.code_steps import CodeSteps
from sglang_hybrid.policies.scout.fit_predictor import Calibrator
from sglang_hybrid.policies.scout.predictor import QueryWeights
from sglang_hybrid.policies.scout.special_tokens import special_windows

logger = logging.getLogger("sglang.srt.hybrid")

_MOST_BYTES = 4 << 30  # upper limit for the sums of a group of layers
_SHARE_OF_FREE = 0.25


def refuse_inputs(args: Any) -> None:
    """Raise UnknownLayers if hooks read inputs other than those from which layers compute their queries."""
    if args.enable_lora or args.lora_paths:
        raise UnknownLayers("LoRA adapters change queries, and predictions are made from the model's own weights")
    fused = ("enable_flashinfer_allreduce_fusion", "enable_aiter_allreduce_fusion")
    if args.tp_size > 1 and any(getattr(args, flag, False) for flag in fused):
        raise UnknownLayers(
            "layers get a rank's part of their input before it is summed: start with "
            "--enforce-disable-flashinfer-allreduce-fusion"
        )


def calibrate(
    model_runner: Any,
    text: CalibrationText,
    rank: int | str = "auto",
    progress: Callable[[float], None] = lambda _part: None,
) -> Calibration:
    """Fit all layers of this rank. Every rank has to call this function with the same text.

    ``rank`` is that of corrections, as for ``Calibrator.calibrate``. ``progress`` is called with each share of the work
    that is done; the shares sum to 1. Raise UnknownLayers if the model cannot be calibrated.
    """
    args = model_runner.server_args
    refuse_inputs(args)
    if args.enable_dp_attention:
        raise UnknownLayers("with data-parallel attention the ranks compute different tokens")
    layers = DecoderLayers(model_runner.model)
    weights = {layer: layers.query_weights(layer) for layer in layers.ids}
    made = Calibration(layers={}, channels={})
    most = smallest_of_ranks(model_runner, _layers_at_a_time(weights, text, _free_bytes(model_runner.device)))
    groups = [layers.ids[start : start + most] for start in range(0, len(layers.ids), most)]
    with _exact_products():
        for group in groups:
            _fit_group(model_runner, layers, weights, group, text, rank, made)
            progress(1 / len(groups))
    if torch.device(model_runner.device).type == "cuda":
        torch.cuda.empty_cache()  # CUDA graphs are recorded next, in a memory pool of their own
    return made


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Multiply float32 matrices in full precision within this context.

    A server may have enabled TensorFloat-32, in which sums of squares are too inexact for the regression.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _fit_group(
    model_runner: Any,
    layers: DecoderLayers,
    weights: Mapping[int, QueryWeights],
    group: Sequence[int],
    text: CalibrationText,
    rank: int | str,
    made: Calibration,
) -> None:
    """Add the layers of ``group`` to ``made``."""
    calibrator = Calibrator(weights, [layer for layer in group if layer != layers.ids[0]])
    spreads = {layer: ChannelSpread(weights[layer].rotary.shape[-1], weights[layer].neox) for layer in group}
    samples = {layer: SkewSample() for layer in group}
    sizes: dict[int, CodeSteps] = {}

    def measured(layer: int, _queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        # keys and values of two widths have no slots in 8 bits: CUDA kernels want one width of both
        if layer in spreads and keys.shape == values.shape:
            rotated = weights[layer].rotary.shape[-1], weights[layer].neox
            sizes.setdefault(layer, CodeSteps(*rotated)).add(keys, values)

    def attended(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        measured(layer, queries, keys, values)
        if layer in spreads:
            spreads[layer].add(queries, keys)
            samples[layer].add(queries, keys)

    for window in text.fit:
        calibrator.add(_inputs(model_runner, layers, group, window, attended))
    unseen = [_inputs(model_runner, layers, group, window, measured) for window in text.unseen]
    for window in text.special:
        _inputs(model_runner, layers, group, window, measured)
    made.layers.update(calibrator.calibrate(unseen, rank))
    made.channels.update({layer: spread.order() for layer, spread in spreads.items()})
    made.skews.update({layer: sample.skew() for layer, sample in samples.items()})
    made.steps.update({layer: size.steps() for layer, size in sizes.items()})


class _Computed(Exception):
    """Ends a forward pass early: all inputs that were asked for have been computed."""


def _inputs(
    model_runner: Any,
    layers: DecoderLayers,
    group: Sequence[int],
    window: Sequence[int],
    attended: Attended,
) -> dict[int, torch.Tensor]:
    """Return the inputs ``[tokens, hidden]``, by layer id, of the layers of ``group`` and of the layer before them."""
    seen: dict[int, torch.Tensor] = {}

    def take(layer: int, inputs: torch.Tensor, _positions: torch.Tensor, _batch: Any) -> None:
        if layer > group[-1]:
            raise _Computed
        if layer >= group[0] - 1:
            seen[layer] = inputs.clone()

    with _on_input(layers, take), contextlib.suppress(_Computed):
        run_text(model_runner, window, attended)
    return seen


@contextlib.contextmanager
def _on_input(layers: DecoderLayers, take: Callable[..., None]) -> Iterator[None]:
    stop = layers.on_input(take)
    try:
        yield
    finally:
        stop()


def _layers_at_a_time(weights: Mapping[int, QueryWeights], text: CalibrationText, free: int) -> int:
    """Return the number of layers whose sums, and inputs of unseen text, fit in a share of the free memory."""
    of_layer = next(iter(weights.values()))
    unseen = sum(map(len, text.unseen)) * of_layer.norm.shape[0] * of_layer.projection.element_size()
    each = LayerFit.device_bytes(of_layer) + unseen
    return max(1, int(min(_MOST_BYTES, free * _SHARE_OF_FREE)) // each)


def _free_bytes(device: str) -> int:
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return container.memory().available


def text_for(model_runner: Any) -> CalibrationText:
    """Return the package's own text in the model's tokens, or random tokens if the model has no tokenizer."""
    config, args = model_runner.model_config, model_runner.server_args
    hidden, longest = config.hidden_size, config.context_len
    try:
        from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

        tokenizer = get_tokenizer(
            # newer SGLang resolves the default elsewhere
            args.tokenizer_path or args.model_path,
            tokenizer_mode=args.tokenizer_mode,
            trust_remote_code=args.trust_remote_code,
        )
        text = calibration_text(lambda text: tokenizer.encode(text, add_special_tokens=False), hidden, longest)
        return dataclasses.replace(text, special=special_windows(tokenizer, longest))
    except Exception as error:  # NoWords, or any error that Hugging Face's code raises without files
        logger.warning("calibrating on tokens at random, because the model has no tokenizer: %s", error)
        return without_tokenizer(config.vocab_size, hidden, longest)
