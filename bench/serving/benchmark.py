"""Runs SGLang's own server benchmark (`python -m sglang.bench_serving`) many times, in one process that stays up."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.side_by_side.telling import log_tail
from sglang_hybrid.commands.pd.processes import ServerProcess, end_all, wait_until
from sglang_hybrid.origin import ROOT

_FIGURES = (
    "duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "input_throughput",
    "output_throughput", "total_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_itl_ms",
    "median_itl_ms", "p99_itl_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_e2e_latency_ms",
    "concurrency",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    url: str
    model: Path
    tokenizer: Path


@dataclass(frozen=True)
class Asked:
    prompts: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    rate: float = math.inf  # requests a second, arriving at random times (Poisson); infinite: all at once
    conversations: Path | None = None  # in ShareGPT's format, instead of random tokens of one length
    seed: int = 1

    def flags(self) -> list[str]:
        if self.conversations:
            data = ["--dataset-name", "sharegpt", "--dataset-path", str(self.conversations)]
        else:
            data = [
                "--dataset-name", "random-ids", "--tokenize-prompt", "--random-input-len", str(self.input_tokens),
                "--random-output-len", str(self.output_tokens), "--random-range-ratio", "1",
            ]  # fmt: skip
        return [
            *data, "--num-prompts", str(self.prompts), "--request-rate", str(self.rate), "--max-concurrency",
            str(self.concurrency), "--seed", str(self.seed),
        ]  # fmt: skip


class Benchmark:
    """Process that runs SGLang's benchmark. Use as a context manager, entered before the server starts.

    The benchmark then loads while the server does.
    """

    def __init__(self, folder: Path) -> None:
        self._log, self._root = folder / "bench-serving.log", folder
        self._member: ServerProcess | None = None
        self._runs = 0

    def __enter__(self) -> Benchmark:
        self._folder = Path(tempfile.mkdtemp(prefix="bench-serving-", dir=self._root))
        self._runs = 0
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "bench.serving.late_benchmark", str(self._folder)]
        self._member = ServerProcess("bench_serving", command, self._log, {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path})
        return self

    def __exit__(self, *_: object) -> None:
        if self._member is not None:
            end_all([self._member])

    def run(self, target: Target, asked: Asked, seconds: float) -> dict[str, Any]:
        """Run the benchmark once and return its figures.

        Raise RuntimeError with the end of its output if it fails, TimeoutError after ``seconds``.
        """
        assert self._member is not None
        run, out = self._runs, self._folder / f"{self._runs}.jsonl"
        self._runs += 1
        flags = [
            "--backend", "sglang", "--base-url", target.url, "--model", str(target.model),
            "--tokenizer", str(target.tokenizer), *asked.flags(), "--flush-cache", "--disable-tqdm",
            "--output-details", "--output-file", str(out),
        ]  # fmt: skip
        written = self._folder / f"{run}.writing"
        written.write_text(json.dumps(flags))
        written.rename(self._folder / f"{run}.json")
        status = self._folder / f"{run}.status"
        try:
            wait_until([self._member], status.is_file, seconds, "SGLang's benchmark was not done")
        except TimeoutError:
            end_all([self._member])  # also ends the run that hangs; the next run needs another process
            self.__enter__()
            raise
        if status.read_text() != "0" or not out.is_file():
            told = "\n".join(log_tail(self._log))
            raise RuntimeError(f"bench_serving ended with status {status.read_text()}:\n{told}")
        return {"asked": asked.prompts, **figures(json.loads(out.read_text().splitlines()[-1]))}


def figures(said: dict[str, Any]) -> dict[str, Any]:
    """Return the rounded figures of ``said``, a line of bench_serving's output file.

    SGLang counts a stream with only an error as completed; ``answered`` counts answers with text and a first token.
    """
    told = {name: _rounded(said[name]) for name in _FIGURES if name in said}
    pairs = zip(said["ttfts"], said["generated_texts"], strict=True)
    pauses = [pause for answer in said.get("itls", ()) for pause in answer]
    if pauses:
        told["longest_pause_ms"] = _rounded(1e3 * max(pauses))
    if thirds := _thirds([ttft for ttft in said["ttfts"] if ttft]):
        told["ttft_ms_by_third"] = thirds  # if the queue grows, the last third waits longer
    if errors := [error for error in said.get("errors", ()) if error]:
        told["first_error"] = str(errors[0])[:300]
    return {"answered": sum(bool(ttft and text) for ttft, text in pairs), **told}


def _thirds(seconds: list[float]) -> list[float]:
    """Return medians of the first, middle and last third of ``seconds``, in milliseconds; empty below three."""
    size = len(seconds) // 3
    parts = (seconds[:size], seconds[size : len(seconds) - size], seconds[len(seconds) - size :])
    return [round(1e3 * statistics.median(part), 1) for part in parts] if size else []


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value
