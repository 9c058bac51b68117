"""Times of decode steps in the engine that a server would have, without a scheduler around the steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from sglang_hybrid.commands.report.session.loaded import Loaded
from sglang_hybrid.commands.report.session.messages import Tell
from sglang_hybrid.commands.report.session.prompts import rows_of_text, text_tokens
from sglang_hybrid.integration.model_session import Prefilled


def speed(
    session: Loaded, *, tell: Tell, points: Sequence[tuple[int, int]], steps: int, warm_steps: int
) -> dict[str, Any]:
    """Measure decode steps at each of ``points``: (tokens per prompt, rows that decode together).

    ``step_ms`` is the median of ``steps`` steps after ``warm_steps`` untimed ones.
    """
    measured = []
    for length, rows in points:
        if rows * (length + steps + warm_steps + 64) > session.model.capacity_tokens:
            measured.append({"length": length, "rows": rows, "error": "the rows do not fit in the KV cache"})
            continue
        prompts = rows_of_text(session, rows, length)
        text = f"{rows} rows of {length} tokens"
        prefilled = session.prefill_in_turn(prompts, lambda part, text=text: tell(text, part / len(points)))  # type: ignore[misc]
        times = decode(session, prefilled, warm_steps + steps)[warm_steps:]
        median = statistics.median(times)
        measured.append(
            {
                "length": length, "rows": rows, "step_ms": round(1e3 * median, 3),
                "step_ms_longest": round(1e3 * max(times), 3), "tokens_per_s": round(rows / median, 2), "steps": steps,
            }
        )  # fmt: skip
    return {"points": measured, "engine": engine_name(session)}


def rate(session: Loaded, *, tell: Tell, prompt_tokens: int, steps: int, bins: int) -> dict[str, Any]:
    """Decode ``steps`` tokens of a text in one row: tokens per second in each of ``bins`` parts, and slow steps."""
    ids = text_tokens(session)
    while len(ids) < prompt_tokens + steps:
        ids = [*ids, *ids]
    prefilled = session.prefill_in_turn([ids[:prompt_tokens]], lambda _part: None)
    times = []
    for step in range(steps):
        begin = time.perf_counter()
        prefilled.step(torch.tensor([ids[prompt_tokens + step]]))
        session.wait()
        times.append(time.perf_counter() - begin)
        tell(f"step {step + 1} of {steps}", 1 / steps)
    size = max(1, steps // bins)
    parts = [times[first : first + size] for first in range(0, steps - size + 1, size)]
    rising = sorted(times)
    return {
        "prompt_tokens": prompt_tokens,
        "steps": steps,
        "engine": engine_name(session),
        "bins": [
            {"until": prompt_tokens + (number + 1) * size, "tokens_per_s": round(size / sum(part), 3)}
            for number, part in enumerate(parts)
        ],
        "ms_between_tokens": {
            "median": round(1e3 * statistics.median(times), 3),
            "p95": round(1e3 * rising[min(len(rising) - 1, int(0.95 * len(rising)))], 3),
            "longest": round(1e3 * rising[-1], 3),
        },
    }


def decode(session: Loaded, prefilled: Prefilled, steps: int) -> list[float]:
    """Run ``steps`` greedy decode steps and return the seconds of each."""
    tokens = prefilled.logits.argmax(dim=1)
    times = []
    for _ in range(steps):
        session.wait()
        begin = time.perf_counter()
        tokens = prefilled.step(tokens).argmax(dim=1)
        session.wait()
        times.append(time.perf_counter() - begin)
    return times


def engine_name(session: Loaded) -> str:
    """Return the name of the engine that computes attention, in words."""
    backend = session.model.runner.attn_backend
    engine = getattr(backend, "engine", None)
    if engine is None:
        return f"stock SGLang, {type(backend).__name__}"
    words = {"TorchEngine": "plain torch", "CpuEngine": "native CPU kernels", "CudaEngine": "CUDA graphs"}
    return words.get(type(engine).__name__, type(engine).__name__)
