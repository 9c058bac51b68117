"""Scales of a quantised KV cache, which a checkpoint may give for each layer.

A layer's keys are stored divided by its ``k_scale`` and its values by its ``v_scale``. One number for all keys of a
layer is a factor of all the layer's logits, and one number for all values is a factor of its output. So engines,
kernels and the worker know nothing of scales: ``k_scale`` is part of the logits' scale that they get, and the attention
backend multiplies their output by ``v_scale``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_hybrid.ops.reference import FP8

FP8_FLAG = "fp8_e4m3"  # value of --kv-cache-dtype


class KVScales(NamedTuple):
    keys: float = 1.0
    values: float = 1.0


def scales_of(attention: Any, pool_dtype: torch.dtype) -> KVScales:
    """Return the scales of a ``RadixAttention`` layer; 1 if the pool is not FP8 or the checkpoint gives no scale."""
    if pool_dtype != FP8:
        return KVScales()
    given = (getattr(attention, "k_scale_float", None), getattr(attention, "v_scale_float", None))
    return KVScales(*(1.0 if scale is None else float(scale) for scale in given))
