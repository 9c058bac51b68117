"""Record several CUDA graphs for every batch size: one for each variant of a decode step that the engine has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sglang_hybrid.engines.base import Engine


def capture_one_shape(original: Callable[..., Any], runner: Any, size: int, *args: Any, **kwargs: Any) -> Any:
    """Record one CUDA graph of this batch size for each variant of the engine's decode step."""
    engine = _engine(runner)
    if engine is None:
        return original(runner, size, *args, **kwargs)
    for variant in engine.graph_variants(size):
        with engine.recording(variant):
            result = original(runner, size, *args, **kwargs)
    return result


def make_graph_key(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Return SGLang's key of a graph, extended by the variant of the decode step that is recorded or begins."""
    key, engine = original(runner, *args, **kwargs), _engine(runner)
    if engine is None or not engine.graph_variant:
        return key
    label = engine.graph_variant if key.variant_label is None else f"{key.variant_label}-{engine.graph_variant}"
    return dataclasses.replace(key, variant_label=label)


def _engine(runner: Any) -> Engine | None:
    engine = getattr(runner.model_runner.attn_backend, "engine", None)  # other backends may have an "engine"
    return engine if isinstance(engine, Engine) else None
