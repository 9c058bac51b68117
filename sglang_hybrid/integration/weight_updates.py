"""Weights that change while a server runs: predictors are made from weights, and profiles fit one set of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

METHODS = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


def update(original: Callable[..., tuple[bool, str]], worker: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Around SGLang's updates of weights in a scheduler process, whatever their source."""
    from sglang_hybrid.integration.attention_backend import HybridAttnBackend

    backend = worker.model_runner.attn_backend
    if not isinstance(backend, HybridAttnBackend):
        return original(worker, *args, **kwargs)
    if why := backend.why_weights_must_stay():
        return False, why
    success, message = original(worker, *args, **kwargs)
    backend.weights_changed()  # also after a failure, which may have changed some of them
    return success, message
