"""Entry point ``sglang.srt.plugins``: SGLang calls ``register`` in every process before it parses arguments."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make ``--attention-backend hybrid`` known to this process.

    SGLang only logs an exception raised here. But then the backend's name stays unknown and SGLang's argument parser
    refuses it, so a failure is never silent.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    from sglang_hybrid.integration import BACKEND_NAME, hooks
    from sglang_hybrid.integration.versions import check_sglang_version

    check_sglang_version()
    hooks.register()
    if BACKEND_NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND_NAME])
    if BACKEND_NAME not in ATTENTION_BACKENDS:
        register_attention_backend(BACKEND_NAME)(create_backend)


def create_backend(model_runner: Any) -> Any:
    """Create the attention backend. SGLang calls this factory in the process that runs the model."""
    from sglang_hybrid.integration import hooks
    from sglang_hybrid.integration.attention_backend import HybridAttnBackend
    from sglang_hybrid.integration.refusals import told

    hooks.verify()
    with told():
        return HybridAttnBackend(model_runner)
