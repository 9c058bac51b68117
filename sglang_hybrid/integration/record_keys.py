"""Keys that a loaded model makes of a text, as the KV pool gets them: after rotation."""

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
    """Of each layer, ``[KV heads of this rank, tokens of all windows, head_dim]``, float16, in host memory.

    Windows begin at positions that are spread over a context of ``longest`` tokens. Attention depends on distances, so
    nothing else changes, but rotation turns keys with their position, and slow channels never come round: keys of the
    first positions tell nothing about those of the last. ``progress`` gets parts that sum to 1. Raises UnknownLayers.
    """
    seen: dict[int, list[torch.Tensor]] = {}

    def attended(layer: int, _queries: torch.Tensor, keys: torch.Tensor) -> None:
        seen.setdefault(layer, []).append(keys.transpose(0, 1).to("cpu", torch.float16))

    for number, window in enumerate(windows):
        room = max(0, longest - len(window))
        run_text(model_runner, window, attended, first=room * number // max(1, len(windows) - 1))
        progress(1 / len(windows))
    return [torch.cat(seen[layer], dim=1) for layer in sorted(seen)]
