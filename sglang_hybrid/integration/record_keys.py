"""Record the keys that a loaded model computes for a text, as the KV pool stores them: after rotation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_hybrid.integration.causal_forward import run_text


def record_keys(
    model_runner: Any,
    windows: Sequence[Sequence[int]],
    longest: int,
    progress: Callable[[float], None] = lambda _part: None,
) -> list[torch.Tensor]:
    """Return each layer's keys, ``[KV heads of this rank, tokens of all windows, head_dim]``, float16, in host memory.

    Windows start at positions that are spread over a context of ``longest`` tokens. Attention depends on distances, so
    nothing else changes, but rotation turns keys with their position, and slow channels never complete a turn: keys at
    the first positions differ from those at the last. ``progress`` is called with each share of the work that is done;
    the shares sum to 1. Raise UnknownLayers if the model is not built like Llama.
    """
    seen: dict[int, list[torch.Tensor]] = {}

    def attended(layer: int, _queries: torch.Tensor, keys: torch.Tensor, _values: torch.Tensor) -> None:
        seen.setdefault(layer, []).append(keys.transpose(0, 1).to("cpu", torch.float16))

    for number, window in enumerate(windows):
        room = max(0, longest - len(window))
        run_text(model_runner, window, attended, first=room * number // max(1, len(windows) - 1))
        progress(1 / len(windows))
    return [torch.cat(seen[layer], dim=1) for layer in sorted(seen)]
