"""Updates of weights while a server runs: predictors are computed from weights, and a profile fits one set of them."""

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
    """Return the methods of SGLang's updater that change weights. Each method returns success and a message."""
    updater = pkgutil.resolve_name(UPDATER)
    from_peers = ("load_weights_from_distributed", "update_weights_from_distributed")  # since 0.5.21, and before
    return (
        "update_weights_from_disk",
        next((name for name in from_peers if hasattr(updater, name)), from_peers[0]),
        "update_weights_from_tensor",
        "update_weights_from_ipc",
    )


def methods_that_finish() -> tuple[str, ...]:
    """Return the method that ends a session of updates; empty before SGLang 0.5.21, which has no sessions.

    A peer may have written to the weights directly before a session ends.
    """
    return ("end_weight_update",) if hasattr(pkgutil.resolve_name(UPDATER), "end_weight_update") else ()


def update(original: Callable[..., tuple[bool, str]], updater: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Refuse an update of weights that engines cannot follow; otherwise create predictors anew after it.

    Hook around all methods that load weights in a scheduler process.
    """
    backend = _backend(updater)
    if backend is None:
        return original(updater, *args, **kwargs)
    if why := backend.why_weights_must_stay():
        return False, why
    success, message = original(updater, *args, **kwargs)
    backend.weights_changed()  # also after a failure, which may have changed some weights
    return success, message


def session_ended(_result: Any, updater: Any, *_args: Any, run_post_load: bool = True, **_kwargs: Any) -> None:
    """Create predictors anew after a session of updates in which a peer wrote the weights.

    Hook after the end of a session. ``run_post_load`` means that nothing was loaded through SGLang.
    """
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
