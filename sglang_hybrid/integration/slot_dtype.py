"""Whether slots of GPU memory keep codes of 8 bits, once the model is known."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.integration.calibrate import refuse_inputs
from sglang_hybrid.integration.causal_forward import decoder_of
from sglang_hybrid.integration.decoder_layers import DecoderLayers, UnknownLayers
from sglang_hybrid.policies.registry import keeps_codes_in_slots


def settled(
    config: HybridConfig, model: torch.nn.Module, args: Any, device: str, kv_dtype: torch.dtype
) -> HybridConfig:
    """Return the settings with what ``scout.slot_dtype`` is for this model and KV cache.

    Memory is divided before the model is calibrated, so this must be known before. ``args``: SGLang's.
    """
    dtype = config.scout.slot_dtype
    if kv_dtype.itemsize == 1:
        dtype = "model"  # its blocks have 8 bits a number already
    elif dtype == "auto":
        has_kernels = torch.device(device).type == "cuda" and kv_dtype.itemsize == 2
        encodes = has_kernels and keeps_codes_in_slots(config) and _can_be_calibrated(model, args)
        dtype = "int8" if encodes else "model"
    return config.with_section(msgspec.structs.replace(config.scout, slot_dtype=dtype))


def _can_be_calibrated(model: torch.nn.Module, args: Any) -> bool:
    try:
        refuse_inputs(args)
        decoder_of(model)
        for layer in DecoderLayers(model).ids:
            DecoderLayers(model).query_weights(layer)  # one at a time: matrices are computed from quantised weights
    except UnknownLayers:
        return False
    return not args.enable_dp_attention
