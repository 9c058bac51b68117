"""Weights that change while a server runs: predictors are made from weights, and profiles fit one set of them."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_hybrid.integration.attention_backend import HybridAttnBackend

logger = logging.getLogger("sglang.srt.hybrid")

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


def methods_that_load() -> tuple[str, ...]:
    """Methods of SGLang's updater that change weights and return whether they did, with a message."""
    updater = pkgutil.resolve_name(UPDATER)
    from_peers = ("load_weights_from_distributed", "update_weights_from_distributed")  # since 0.5.21, and before
    return (
        "update_weights_from_disk",
        next((name for name in from_peers if hasattr(updater, name)), from_peers[0]),
        "update_weights_from_tensor",
        "update_weights_from_ipc",
    )


def methods_that_finish() -> tuple[str, ...]:
    """Since 0.5.21 updates are made in sessions. A peer may have written to the weights directly before one ends."""
    return ("end_weight_update",) if hasattr(pkgutil.resolve_name(UPDATER), "end_weight_update") else ()


def update(original: Callable[..., tuple[bool, str]], updater: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Around SGLang's updates of weights in a scheduler process, whatever their source."""
    backend = _backend(updater)
    if backend is None:
        return original(updater, *args, **kwargs)
    if why := backend.why_weights_must_stay():
        return False, why
    success, message = original(updater, *args, **kwargs)
    backend.weights_changed()  # also after a failure, which may have changed some of them
    return success, message


def session_ended(_result: Any, updater: Any, *_args: Any, run_post_load: bool = True, **_kwargs: Any) -> None:
    """After a session of updates. ``run_post_load``: nothing was loaded through SGLang, so a peer wrote the weights."""
    backend = _backend(updater)
    if backend is None or not run_post_load:
        return
    if why := backend.why_weights_must_stay():
        logger.error("weights were changed from outside, and they must not be: %s", why)
        return
    backend.weights_changed()


def _backend(updater: Any) -> HybridAttnBackend | None:
    from sglang_hybrid.integration.attention_backend import HybridAttnBackend

    backend = updater.get_model_runner().attn_backend
    return backend if isinstance(backend, HybridAttnBackend) else None
