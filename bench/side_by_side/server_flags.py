"""Command-line flags of compared servers: those that all have in common, and those of their KV caches."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from bench.side_by_side.configurations import Configuration


def common_flags(model: Path, device: str, batches: Sequence[int], tokenizer: Path | None = None) -> list[str]:
    """Return flags of every server.

    ``batches``: rows for which graphs are recorded, rising; the last is the most rows at once. ``tokenizer``: None:
    the server has no tokenizer.
    """
    words = ["--tokenizer-path", str(tokenizer)] if tokenizer else ["--skip-tokenizer-init"]
    flags = [
        "--model-path", str(model), *words, "--device", device, "--max-running-requests", str(batches[-1]),
        "--sampling-backend", "pytorch", "--random-seed", "1",
    ]  # fmt: skip
    if importlib.util.find_spec("prometheus_client"):
        flags.append("--enable-metrics")
    if device == "cpu":
        return [*flags, "--dtype", "float32"]
    return [*flags, "--cuda-graph-bs-decode", *map(str, batches), "--cuda-graph-backend-prefill", "disabled"]


def cache_flags(configuration: Configuration, stock_tokens: int, host_memory: str) -> list[str]:
    """Return flags of the KV cache: ``stock_tokens`` in GPU memory for stock, ``host_memory`` for hybrid."""
    dtype = ["--kv-cache-dtype", configuration.kv_dtype] if configuration.kv_dtype else []
    if configuration.is_hybrid:
        return ["--hybrid", f"host_memory={host_memory}", *dtype]
    return ["--max-total-tokens", str(stock_tokens), *dtype]


def graph_sizes(most: int) -> list[int]:
    """Return the batch sizes to record graphs for; a batch of up to ``most`` rows is padded to the next of them."""
    return sorted(size for size in {1, 2, 4, *range(8, most, 8), most} if size <= most)
