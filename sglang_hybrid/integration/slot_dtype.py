"""Whether slots of GPU memory keep codes of 8 bits, once the model is known."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.integration.calibrate import refuse_inputs
from sglang_hybrid.integration.decoder_layers import DecoderLayers, UnknownLayers
from sglang_hybrid.policies.registry import keeps_codes_in_slots


def settled(
    config: HybridConfig, model: torch.nn.Module, args: Any, device: str, kv_dtype: torch.dtype
) -> HybridConfig:
    """Return the settings with what ``scout.slot_dtype=auto`` is for this model.

    Memory is divided before the model is calibrated, so this must be known before. ``args``: SGLang's.
    """
    if config.scout.slot_dtype != "auto":
        return config
    encodes = (
        torch.device(device).type == "cuda"
        and kv_dtype.itemsize == 2
        and keeps_codes_in_slots(config)
        and _can_be_calibrated(model, args)
    )
    return config.with_section(msgspec.structs.replace(config.scout, slot_dtype="int8" if encodes else "model"))


def _can_be_calibrated(model: torch.nn.Module, args: Any) -> bool:
    try:
        refuse_inputs(args)
        layers = DecoderLayers(model)
        layers.query_weights(layers.ids[0])
    except UnknownLayers:
        return False
    return not args.enable_dp_attention
