"""Two CUDA graphs for every batch size: steps that select blocks, and steps with whole rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sglang_hybrid.integration.device_attention import DeviceAttention


def capture_one_shape(original: Callable[..., Any], runner: Any, size: int, *args: Any, **kwargs: Any) -> Any:
    """Record a batch size in each way in which it is replayed."""
    device = _device(runner)
    if device is None:
        return original(runner, size, *args, **kwargs)
    for whole in device.kinds_of_steps():
        with device.recording(whole):
            result = original(runner, size, *args, **kwargs)
    return result


def make_graph_key(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """The graph of the step that is recorded, or begins: its kind is known by then."""
    key, device = original(runner, *args, **kwargs), _device(runner)
    if device is None or not device.holds_whole_rows:
        return key
    label = "dense" if key.variant_label is None else f"{key.variant_label}-dense"
    return dataclasses.replace(key, variant_label=label)


def _device(runner: Any) -> DeviceAttention | None:
    device = getattr(runner.model_runner.attn_backend, "device", None)  # other backends may have one of these
    return device if isinstance(device, DeviceAttention) else None
