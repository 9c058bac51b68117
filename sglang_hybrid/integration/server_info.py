"""What SGLang's /get_server_info tells about this backend: the effective settings, under one key."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.integration.backend_of import backend_of

KEY = "sglang_hybrid"


def add_settings(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``Scheduler.get_internal_state``: of this replica, as rank 0 has them."""
    backend = backend_of(scheduler)
    if backend is not None:
        result.internal_state[KEY] = backend.describe()
