"""bench/arrivals.py without servers: workloads, memory of each side, which rates count as served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import arrivals
from bench.side_by_side.capacity import KVModel

KV = KVModel(layers=10, kv_heads=8, head_dim=128, itemsize=2)


def point(rate: float, pause: float, answered: int = 8, **more: Any) -> dict[str, Any]:
    told = {"configuration": "hybrid", "workload": "w", "rate": rate, "asked": 8, "answered": answered}
    return {**told, "p99_itl_ms": pause, **more}


def test_the_largest_rate_within_the_limit_is_sustained() -> None:
    points = [point(0.5, 20), point(1.0, 90), point(2.0, 300)]
    assert arrivals.sustained(points, 100) == {"hybrid": {"w": 1.0}}


def test_a_rate_with_lost_answers_or_an_error_is_not_sustained() -> None:
    failed = {"configuration": "hybrid", "workload": "w", "rate": 0.1, "error": "TimeoutExpired"}
    assert arrivals.sustained([point(0.5, 20, answered=7), failed], 100) == {"hybrid": {"w": None}}


def test_workloads_are_input_and_output_tokens() -> None:
    assert arrivals.Workload.of("32k:500") == arrivals.Workload(32768, 500)
    assert str(arrivals.Workload.of("8k:1k")) == "8192 in, 1024 out"


def test_every_side_has_the_same_memory_for_its_cache() -> None:
    args = arrivals.parsed(["--runs", "stock,stock-fp8,hybrid", "--gpu-limit", "11"])
    stock, fp8, hybrid = arrivals.configurations_of(args)

    def tokens(flags: list[str]) -> int:
        return int(flags[flags.index("--max-total-tokens") + 1])

    plain, small = (tokens(arrivals.flags_of(args, Path("m"), Path("t"), KV, one)) for one in (stock, fp8))
    assert plain == 11 * 10**9 // KV.token_bytes and small == 2 * plain + (
        11 * 10**9 % KV.token_bytes * 2 >= KV.token_bytes
    )
    flags = arrivals.flags_of(args, Path("m"), Path("t"), KV, hybrid)
    assert "--max-total-tokens" not in flags and "host_memory=84.0GB" in flags
