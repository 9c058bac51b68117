"""Find our attention backend among the objects of SGLang's scheduler process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_hybrid.integration.host_kv_pool import HostKVPool

if TYPE_CHECKING:
    from sglang_hybrid.integration.attention_backend import HybridAttnBackend


def backend_of(scheduler: Any) -> HybridAttnBackend | None:
    """Return our attention backend; None if the server has another one."""
    if not HostKVPool.in_this_process:
        return None
    from sglang_hybrid.integration.attention_backend import HybridAttnBackend  # imports SGLang's models

    backend = scheduler.tp_worker.model_runner.attn_backend
    return backend if isinstance(backend, HybridAttnBackend) else None
