"""CPU compute ratio (misses over budget) of every decode step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_hybrid.commands.report.session.loaded import Loaded
from sglang_hybrid.commands.report.session.messages import Tell
from sglang_hybrid.commands.report.session.prompts import text_prompts
from sglang_hybrid.config import load_config


def ratios(
    session: Loaded,
    *,
    tell: Tell,
    variants: Sequence[tuple[str, Sequence[str]]],
    windows: int,
    prompt_tokens: int,
    decode_tokens: int,
) -> dict[str, Any]:
    """Return each variant's misses over budget by step (mean over layers), by layer (mean over steps) and overall."""
    prompts = text_prompts(session, windows, prompt_tokens, decode_tokens)
    of_variant = 1 / (len(variants) + 1)
    prefilled = session.prefill([prompt.ids for prompt in prompts], lambda part: tell("prefill", part * of_variant))
    following = torch.tensor([prompt.following for prompt in prompts])
    runs = []
    for name, settings in variants:
        session.use(load_config(None, ["whole_requests=never", *settings]))
        seen = _Seen()
        session.watch_ratio(seen.add)
        prefilled.rewind()
        for step in range(following.shape[1]):
            seen.step = step
            prefilled.step(following[:, step])
            tell(name, of_variant / following.shape[1])
        runs.append({"name": name, "settings": list(settings), **_summary(seen.ratios, following.shape[1])})
    return {"runs": runs}


class _Seen:
    """Collector of the ratios that the engine reports, each with the decode step in which it was reported."""

    def __init__(self) -> None:
        self.step = 0
        self.ratios: dict[int, list[tuple[int, float]]] = {}  # layer -> (step, ratio) pairs

    def add(self, layer: int, ratio: float) -> None:
        self.ratios.setdefault(layer, []).append((self.step, ratio))


def _summary(seen: dict[int, list[tuple[int, float]]], steps: int) -> dict[str, Any]:
    by_step: list[list[float]] = [[] for _ in range(steps)]
    for pairs in seen.values():
        for step, ratio in pairs:
            by_step[step].append(ratio)
    everything = [ratio for pairs in seen.values() for _, ratio in pairs]
    return {
        # null: the step attended to all tokens and has no ratio
        "by_step": [_mean(values) for values in by_step],
        "by_layer": [_mean([ratio for _, ratio in seen[layer]]) for layer in sorted(seen)],
        "mean": _mean(everything),
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 5) if values else None
