"""Add this backend to SGLang's /get_server_info: its effective settings, worker and pool, under one key."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_hybrid import host_settings
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.host import this_host
from sglang_hybrid.integration.backend_of import backend_of

if TYPE_CHECKING:
    from sglang_hybrid.integration.attention_backend import HybridAttnBackend

logger = logging.getLogger("sglang.srt.hybrid")

KEY = "sglang_hybrid"
_KNOWN_BETTER = ("host_memory", "worker_threads", "worker_cores")  # the pool and the worker describe these themselves
_automatic: tuple[HybridConfig, dict[str, str]] | None = None


def add_settings(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Add this replica's settings, as rank 0 has them. Log errors: they must not end the scheduler.

    Hook after ``Scheduler.get_internal_state``.
    """
    try:
        backend = backend_of(scheduler)
        if backend is not None:
            result.internal_state[KEY] = describe(backend)
    except Exception:
        logger.exception("the server's info says nothing of sglang-hybrid")


def describe(backend: HybridAttnBackend) -> dict[str, Any]:
    """Return the backend's labels, settings, worker and pool, in JSON types only."""
    pool = backend.pool
    return {
        **backend.labels(),
        "settings": backend.config.by_key(),
        "automatic": automatic(backend.config),
        "worker": backend.engine.describe_worker(),
        "pool": {
            "bytes": pool.region.size,
            "tokens": pool.size,
            "dtype": str(pool.dtype).removeprefix("torch."),
        },
    }


def automatic(config: HybridConfig) -> dict[str, str]:
    """Return, in words, what settings such as ``auto`` became on this host. The host is inspected only once."""
    global _automatic
    if _automatic is None or _automatic[0] != config:
        chosen = host_settings.resolved(config, this_host())
        _automatic = config, {key: text for key, text in chosen.items() if key not in _KNOWN_BETTER}
    return _automatic[1]
