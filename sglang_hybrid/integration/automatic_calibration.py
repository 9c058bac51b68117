"""``profile=auto``: fit the query predictor at a server's first start with a model, and load it at later starts."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path
from typing import Any

import torch

from sglang_hybrid import events
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.integration.calibrate import calibrate, refuse_inputs, text_for
from sglang_hybrid.integration.decoder_layers import DecoderLayers, UnknownLayers
from sglang_hybrid.integration.ranks import rank_of, smallest_of_ranks
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.policies.registry import keeps_codes_in_slots
from sglang_hybrid.policies.scout.calibration_file import Calibration, CalibrationKey, load_calibration
from sglang_hybrid.policies.scout.corrections_file import Shape
from sglang_hybrid.policies.scout.profile_facts import ProfileError
from sglang_hybrid.user_cache import default_cache_dir

logger = logging.getLogger("sglang.srt.hybrid")

WITHOUT = (
    "queries are not predicted, so that misses wait for the real query, which costs about a third of the decode "
    "throughput at long contexts"
)
_SAMPLED = 997  # the fingerprint reads one of so many weights of a matrix


def calibration_for(config: HybridConfig, model_runner: Any) -> Calibration | None:
    """Return this model's calibration, from an earlier start or fitted now; None if the model cannot be calibrated.

    Raise Refusal instead of returning None if the settings require a calibration, and if device memory is too small
    with several ranks.
    """
    on_gpu = torch.device(model_runner.device).type == "cuda"
    encodes = on_gpu and keeps_codes_in_slots(config)  # memory has been divided for slots of 8 bits
    try:
        refuse_inputs(model_runner.server_args)
        key = key_of(model_runner)
        path = default_cache_dir() / "calibrations" / key.file_name
        return _found(path, key, model_runner) or _fitted(path, model_runner)
    except UnknownLayers as unknown:
        if config.prediction == "calibrated":
            raise Refusal(f"prediction=calibrated: {unknown}; serve it with prediction=none") from unknown
        if encodes:
            raise Refusal(f"scout.slot_dtype=int8: {unknown}; serve it with scout.slot_dtype=model") from unknown
        logger.warning("this model cannot be calibrated (%s): %s", unknown, WITHOUT)
        return None
    except torch.OutOfMemoryError as error:
        has_other_ranks = model_runner.server_args.tp_size > 1  # they would wait for ever
        if has_other_ranks or encodes or config.prediction == "calibrated":
            raise Refusal(
                "there is too little device memory for calibration: lower --mem-fraction-static, or serve with "
                f"--hybrid profile=none{' scout.slot_dtype=model' if encodes else ''}"
            ) from error
        logger.warning("there is too little device memory for calibration: %s", WITHOUT)
        return None


def _found(path: Path, key: CalibrationKey, model_runner: Any) -> Calibration | None:
    """Return the calibration of an earlier start; None unless every rank has one."""
    found = None
    try:
        found = load_calibration(path, key)
    except (ProfileError, OSError) as error:
        logger.warning("calibration %s is made anew: %s", path, error)
    if not smallest_of_ranks(model_runner, int(found is not None)) or found is None:
        return None
    logger.info("calibrated at an earlier start, %s: %s", path, found.summary())
    return found


def _fitted(path: Path, model_runner: Any) -> Calibration:
    began, text, done = time.monotonic(), text_for(model_runner), 0.0
    logger.info("calibrating predictions on %d tokens, once for this model (profile=none serves without)", text.tokens)

    def progress(part: float) -> None:
        nonlocal done
        done += part
        logger.info("calibrating: %.0f %%, %.1f s", 100 * done, time.monotonic() - began)
        events.tell(events.Calibrating(part=done))

    events.tell(events.Calibrating(part=0.0))
    fitted = calibrate(model_runner, text, progress=progress)
    logger.info("calibrated in %.1f s: %s", time.monotonic() - began, fitted.summary())
    try:
        fitted.save(path)
    except OSError as error:
        logger.warning("the calibration is not kept for the next start, %s cannot be written: %s", path, error)
    return fitted


def key_of(model_runner: Any) -> CalibrationKey:
    """Return the key of this rank's calibration file. Raise UnknownLayers if the model's weights cannot be read."""
    config, args = model_runner.model_config, model_runner.server_args
    layers = DecoderLayers(model_runner.model)
    weights = layers.query_weights(layers.ids[0])
    return CalibrationKey(
        architecture=config.hf_config.architectures[0],
        weights=_fingerprint(model_runner.model, layers),
        dtype=str(weights.projection.dtype).removeprefix("torch."),
        ranks=args.tp_size,
        rank=rank_of(model_runner).rank,
        shape=Shape(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            query_heads=weights.projection.shape[0] // weights.head_dim,
            kv_heads=layers.key_projection(layers.ids[0]).shape[0] // weights.head_dim,
            head_dim=weights.head_dim,
        ),
    )


def _fingerprint(model: torch.nn.Module, layers: DecoderLayers) -> str:
    """Return a hash of sampled weights of every matrix. Fine-tuned variants of a model differ in all matrices."""
    digest = hashlib.sha256(repr(layers.ids).encode())
    for name, weight in model.named_parameters():
        flat = weight.data.reshape(-1)
        sampled = flat[:: _SAMPLED if flat.numel() > _SAMPLED else 1].to("cpu").contiguous()
        digest.update(name.encode())
        digest.update(sampled.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
