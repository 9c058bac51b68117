"""Breakdown of a decode step's time: by kernels on a GPU, by modules of the model on a CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from sglang_hybrid.commands.report.session import gpu_trace
from sglang_hybrid.commands.report.session.loaded import Loaded
from sglang_hybrid.commands.report.session.messages import Tell
from sglang_hybrid.commands.report.session.prompts import rows_of_text
from sglang_hybrid.commands.report.session.speed import decode, engine_name
from sglang_hybrid.integration.module_times import module_times


def breakdown(session: Loaded, *, tell: Tell, length: int, rows: int, steps: int, warm_steps: int) -> dict[str, Any]:
    """Return the milliseconds per decode step of each part. ``idle_share`` is None without a GPU."""
    prompts = rows_of_text(session, rows, length)
    prefilled = session.prefill_in_turn(prompts, lambda part: tell(f"{rows} rows of {length} tokens", 0.8 * part))
    decode(session, prefilled, warm_steps)
    measured = _on_gpu(session, prefilled, steps) if session.on_gpu else _on_cpu(session, prefilled, steps)
    tell("steps", 0.2)
    return {"length": length, "rows": rows, "steps": steps, "engine": engine_name(session), **measured}


def _on_cpu(session: Loaded, prefilled: Any, steps: int) -> dict[str, Any]:
    with module_times(session.model.model) as seconds:
        times = decode(session, prefilled, steps)
    step_ms = 1e3 * sum(times) / steps
    parts = {name: round(1e3 * value / steps, 3) for name, value in seconds.items()}
    parts["rest"] = round(max(0.0, step_ms - sum(parts.values())), 3)
    return {"step_ms": round(step_ms, 3), "parts": parts, "idle_share": None}


def _on_gpu(session: Loaded, prefilled: Any, steps: int) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        decode(session, prefilled, steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.trace.json"
        profiler.export_chrome_trace(str(path))
        found = gpu_trace.breakdown(gpu_trace.read_trace(path), steps)
    torch.cuda.empty_cache()
    lost = found["idle_ms"] + found["waiting_ms"]
    parts = {name: one["alone_ms"] for name, one in found["categories"].items()}
    return {
        "step_ms": found["step_ms"],
        "parts": {**parts, "idle": found["idle_ms"]},
        "idle_share": round(lost / found["step_ms"], 4) if found["step_ms"] else None,
    }
