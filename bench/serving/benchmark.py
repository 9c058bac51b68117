"""SGLang's own benchmark of a server (`sglang-hybrid bench serving`), as a process with a time limit."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.side_by_side.telling import log_tail
from sglang_hybrid.commands.pd.processes import ServerProcess, end_all
from sglang_hybrid.origin import ROOT

_FIGURES = (
    "duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "input_throughput",
    "output_throughput", "total_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_itl_ms",
    "median_itl_ms", "p99_itl_ms", "max_itl_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms",
    "mean_e2e_latency_ms", "concurrency",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    prompts: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    rate: float = math.inf  # requests a second, arriving at random times (Poisson); infinite: all at once


class Benchmark:
    """Started beside the server, so that it is loaded when the server serves. Use as a context."""

    def __init__(self, url: str, model: Path, tokenizer: Path, asked: Asked, folder: Path) -> None:
        self._asked, self._folder = asked, folder
        self._go, self._out = folder / "bench-serving.go", folder / "bench-serving.jsonl"
        for old in (self._go, self._out):
            old.unlink(missing_ok=True)
        self._command = [
            sys.executable, "-m", "bench.serving.late_benchmark", str(self._go),
            "--backend", "sglang", "--base-url", url, "--model", str(model), "--tokenizer", str(tokenizer),
            "--dataset-name", "random-ids", "--tokenize-prompt", "--num-prompts", str(asked.prompts),
            "--random-input-len", str(asked.input_tokens), "--random-output-len", str(asked.output_tokens),
            "--random-range-ratio", "1", "--request-rate", str(asked.rate), "--max-concurrency", str(asked.concurrency),
            "--flush-cache", "--disable-tqdm", "--output-details", "--output-file", str(self._out),
        ]  # fmt: skip

    def __enter__(self) -> Benchmark:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        self._member = ServerProcess("bench_serving", self._command, self._folder / "bench-serving.log", environment)
        return self

    def __exit__(self, *_: object) -> None:
        end_all([self._member])

    def run(self, seconds: float) -> dict[str, Any]:
        """Raises RuntimeError with the end of its output if it fails, TimeoutExpired after ``seconds``."""
        self._go.touch()
        status = self._member.process.wait(seconds)
        if status or not self._out.is_file():
            told = "\n".join(log_tail(self._member.log))
            raise RuntimeError(f"bench_serving ended with status {status}:\n{told}")
        return {"asked": self._asked.prompts, **figures(json.loads(self._out.read_text().splitlines()[-1]))}


def figures(said: dict[str, Any]) -> dict[str, Any]:
    """SGLang counts a stream that only told an error as completed: an answer is one that has text and a first token."""
    told = {name: _rounded(said[name]) for name in _FIGURES if name in said}
    pairs = zip(said["ttfts"], said["generated_texts"], strict=True)
    return {"answered": sum(bool(ttft and text) for ttft, text in pairs), **told}


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value
