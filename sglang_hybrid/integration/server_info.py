"""What SGLang's /get_server_info tells about this backend: the effective settings and what follows, under one key."""

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
_KNOWN_BETTER = ("host_memory", "worker_threads", "worker_cores")  # by the pool and the worker themselves
_automatic: tuple[HybridConfig, dict[str, str]] | None = None


def add_settings(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``Scheduler.get_internal_state``: of this replica, as rank 0 has them. Never ends the scheduler."""
    try:
        backend = backend_of(scheduler)
        if backend is not None:
            result.internal_state[KEY] = describe(backend)
    except Exception:
        logger.exception("the server's info says nothing of sglang-hybrid")


def describe(backend: HybridAttnBackend) -> dict[str, Any]:
    """JSON types only."""
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
    """What settings that leave a choice became on this host, in words. The host is asked once."""
    global _automatic
    if _automatic is None or _automatic[0] != config:
        chosen = host_settings.resolved(config, this_host())
        _automatic = config, {key: text for key, text in chosen.items() if key not in _KNOWN_BETTER}
    return _automatic[1]
