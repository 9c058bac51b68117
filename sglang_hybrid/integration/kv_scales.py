"""Scales of a quantised KV cache, which a checkpoint may give for each layer.

A layer's keys are stored divided by its ``k_scale`` and its values by its ``v_scale``. One number for all keys of a
layer is a factor of all its logits, and one for its values a factor of its output. So engines, kernels and the worker
know nothing of scales: the scale of the logits has one of them, and the output is multiplied by the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_hybrid.ops.reference import FP8

FP8_FLAG = "fp8_e4m3"  # of --kv-cache-dtype


class KVScales(NamedTuple):
    keys: float = 1.0
    values: float = 1.0


def scales_of(attention: Any, pool_dtype: torch.dtype) -> KVScales:
    """Of SGLang's ``RadixAttention``, over a pool of that dtype: 1 where nothing is quantised or no scale is given."""
    if pool_dtype != FP8:
        return KVScales()
    given = (getattr(attention, "k_scale_float", None), getattr(attention, "v_scale_float", None))
    return KVScales(*(1.0 if scale is None else float(scale) for scale in given))
