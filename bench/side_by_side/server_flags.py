"""Flags that servers of a comparison have in common, and those of their KV caches."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from bench.side_by_side.configurations import Configuration


def common_flags(model: Path, device: str, batches: Sequence[int], tokenizer: Path | None = None) -> list[str]:
    """``batches``: rows for which graphs are recorded, the most that run last. ``tokenizer``: None for none."""
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
    """``stock_tokens``: of stock's pool in GPU memory; ``host_memory``: of hybrid's."""
    dtype = ["--kv-cache-dtype", configuration.kv_dtype] if configuration.kv_dtype else []
    if configuration.is_hybrid:
        return ["--hybrid", f"host_memory={host_memory}", *dtype]
    return ["--max-total-tokens", str(stock_tokens), *dtype]


def graph_sizes(most: int) -> list[int]:
    """Batches of any number of rows up to ``most``: each is padded to the next of these."""
    return sorted(size for size in {1, 2, 4, *range(8, most, 8), most} if size <= most)
