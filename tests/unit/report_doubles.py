"""Stand-ins for tests of ``sglang-hybrid report``: sessions that answer without a process and without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_hybrid.commands.report.cache import Cache
from sglang_hybrid.commands.report.context import Context
from sglang_hybrid.commands.report.model import Model
from sglang_hybrid.commands.report.session.client import MeasurementError
from sglang_hybrid.commands.report.session.load import Load
from sglang_hybrid.commands.report.sizes import SIZES

POLICIES = ("full", "hcattention", "hgca", "infinigen", "scout", "scoutattention")
MACHINE = {"cpu": "Test CPU", "cores": 2, "architecture": "test", "gpu": None, "memory_gib": 8.0}
MODEL = Model(Path("/models/Tiny"), "LlamaForCausalLM", 3, 4, 2, 64, 2048, has_tokenizer=True)


class FakeSession:
    """Answers every operation with invented numbers in the right format, and records the operations in ``asked``."""

    def __init__(self, load: Load, failing: frozenset[str] = frozenset()) -> None:
        self.load, self._failing = load, failing
        self.is_alive = True
        self.asked: list[str] = []

    def ask(self, operation: str, progress: Callable[[str, float], None], **arguments: Any) -> Any:
        self.asked.append(operation)
        progress(operation, 0.5)
        if operation in self._failing:
            raise MeasurementError(f"{operation} fails <here> & now")
        return getattr(self, operation)(**arguments)

    def close(self) -> None:
        self.is_alive = False

    def evaluate(self, variants: list[tuple[str, list[str]]], **asked: Any) -> dict[str, Any]:
        names = [("full attention", ["policy=full"]), *variants]
        return {
            "runs": [_run(name, settings, number, asked) for number, (name, settings) in enumerate(names)],
            "refused": {},
        }

    def ratios(self, variants: list[tuple[str, list[str]]], decode_tokens: int, **_: Any) -> dict[str, Any]:
        by_step = [None, *(0.01 * step for step in range(1, decode_tokens))]
        runs = [
            {"name": name, "settings": settings, "by_step": by_step, "by_layer": [0.1], "mean": 0.1}
            for name, settings in variants
        ]
        return {"runs": runs}

    def speed(self, points: list[tuple[int, int]], **_: Any) -> dict[str, Any]:
        measured = [
            {"length": length, "rows": rows, "step_ms": 10.0, "tokens_per_s": 100.0 * rows} for length, rows in points
        ]
        return {"points": measured, "engine": "plain torch"}

    def rate(self, steps: int, **_: Any) -> dict[str, Any]:
        bins = [{"until": 64 + n, "tokens_per_s": 10.0} for n in range(1, 4)]
        between = {"median": 90.0, "p95": 100.0, "longest": 120.0}
        return {"steps": steps, "bins": bins, "ms_between_tokens": between, "engine": "plain torch"}

    def breakdown(self, length: int, rows: int, **_: Any) -> dict[str, Any]:
        parts = {"attention": 4.0, "feed-forward": 5.0, "rest": 1.0}
        return {
            "length": length,
            "rows": rows,
            "step_ms": 10.0,
            "parts": parts,
            "idle_share": None,
            "engine": "plain torch",
        }

    def cosines(self, **_: Any) -> dict[str, Any]:
        layers = [{"layer": layer, "raw": 0.9, "calibrated": 0.98, "rank": 8} for layer in (1, 2)]
        return {"fitted_tokens": 100, "unseen_tokens": 50, "layers": layers}


def _run(name: str, settings: list[str], number: int, asked: dict[str, Any]) -> dict[str, Any]:
    change = None if number == 0 else {"mean": 0.01 * number, "low": 0.0, "high": 0.02 * number}
    tasks, grid = {}, None
    if asked.get("lengths"):
        tasks = {task: {"score": 0.5, "prompts": 4} for task in asked.get("tasks", ["needle"])}
        row = [0.5] * len(asked["lengths"])
        grid = {
            "lengths": list(asked["lengths"]),
            "depths": list(asked["depths"]),
            "accuracy": [row for _ in asked["depths"]],
        }
    return {
        "name": name, "settings": settings, "perplexity": 8.0 + number, "perplexity_change": change,
        "kl_mean": None if number == 0 else 0.01, "kl_p95": 0.02, "top1_agreement": 0.9, "cpu_ratio": 0.08,
        "tasks": tasks, "needle": grid,
    }  # fmt: skip


class Sessions:
    """Starts fake sessions, and keeps them in ``started``."""

    def __init__(self, failing: frozenset[str] = frozenset()) -> None:
        self.started: list[FakeSession] = []
        self._failing = failing

    def __call__(self, load: Load, _log: Path, _progress: Callable[[str, float], None]) -> FakeSession:
        self.started.append(FakeSession(load, self._failing))
        return self.started[-1]

    @property
    def asked(self) -> list[str]:
        return [operation for session in self.started for operation in session.asked]


def fake_context(
    out: Path, sessions: Sessions, policies: tuple[str, ...] = ("full", "scout", "scoutattention")
) -> Context:
    return Context(
        model=MODEL, size=SIZES["tiny"].within(MODEL.context), policies=policies, has_gpu=False, machine=MACHINE,
        out=out, cache=Cache(out / "results"), start=sessions,
    )  # fmt: skip
