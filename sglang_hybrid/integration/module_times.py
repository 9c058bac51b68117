"""Measure the time of a model's attention, projections and feed-forward parts in forward passes on a CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

ATTENTION, PROJECTIONS, FEED_FORWARD = "attention", "projections", "feed-forward"


@contextlib.contextmanager
def module_times(model: torch.nn.Module) -> Iterator[dict[str, float]]:
    """Yield seconds by part, summed over all forward passes within the context.

    Attention is what a backend computes. Projections are the rest of ``self_attn``: queries, keys, values, rotation and
    output. Hooks time the modules on the host, so the numbers mean nothing on a GPU, which runs asynchronously.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    seconds = {ATTENTION: 0.0, PROJECTIONS: 0.0, FEED_FORWARD: 0.0}
    handles: list[Any] = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, RadixAttention):
            handles += _timed(module, seconds, {ATTENTION: 1, PROJECTIONS: -1})
        elif last == "self_attn":
            handles += _timed(module, seconds, {PROJECTIONS: 1})
        elif last == "mlp":
            handles += _timed(module, seconds, {FEED_FORWARD: 1})
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


def _timed(module: torch.nn.Module, seconds: dict[str, float], signs: dict[str, int]) -> list[Any]:
    """Register hooks that add the module's time to parts of sign 1, and subtract it from parts of sign -1."""
    began = 0.0

    def before(*_: Any) -> None:
        nonlocal began
        began = time.perf_counter()

    def after(*_: Any) -> None:
        passed = time.perf_counter() - began
        for part, sign in signs.items():
            seconds[part] += sign * passed

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
