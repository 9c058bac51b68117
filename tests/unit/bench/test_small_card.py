"""bench/small_card.py without servers: requests that fit in 24 GB, flags, and the record of a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import small_card
from bench.side_by_side.ballast import bytes_to_take
from bench.side_by_side.capacity import GB, KVModel
from bench.side_by_side.card import CONTEXT_BYTES, Fit, fit_of, memory_fraction
from bench.side_by_side.load import LoadError
from bench.side_by_side.statistics import Arrivals
from bench.synthetic_model import QWEN3_8B, TINY, Character, write_model
from sglang_hybrid.config import HybridConfig

KV = KVModel(QWEN3_8B.layers, QWEN3_8B.kv_heads, QWEN3_8B.head_dim, 2, QWEN3_8B.positions)
WEIGHTS = 16_060_000_000


def fit(tokens: int, most: int = 4, card: float = 24, host: float = 120) -> Fit:
    return fit_of(
        KV, HybridConfig(), tokens + 384, most,
        card=int(card * GB), weights=WEIGHTS, reserve=int(1.5 * GB), host=int(host * GB),
    )  # fmt: skip


def test_requests_that_fit_follow_from_what_a_server_takes() -> None:
    assert KV.token_bytes == 147_456
    assert (fit(1 << 17).requests, fit(1 << 18).requests) == (4, 1)
    assert fit(1 << 17, most=2).requests == 2
    assert fit(1 << 17, card=18).requests == 0
    assert "GB hold 3 of 4 requests" in fit(1 << 17, card=23).why


def test_host_memory_limits_requests_too() -> None:
    short = fit(1 << 18, card=40, host=50)
    assert (short.requests, short.by_gpu, short.by_host) == (1, 4, 1)


def test_sglang_leaves_the_reserve_of_what_is_free_when_it_starts() -> None:
    card, reserve = 24 * GB, 15 * GB // 10
    free = card - CONTEXT_BYTES
    assert free * (1 - memory_fraction(card, reserve)) == pytest.approx(reserve, rel=0.01)


def test_ballast_takes_all_but_the_card() -> None:
    assert bytes_to_take(140 * GB, 24 * GB) == 116 * GB
    with pytest.raises(ValueError, match=r"less than the 24\.00 GB"):
        bytes_to_take(20 * GB, 24 * GB)


def test_the_shape_is_qwen3_8bs_and_holds_256k() -> None:
    assert (QWEN3_8B.layers, QWEN3_8B.hidden, QWEN3_8B.heads, QWEN3_8B.kv_heads) == (36, 4096, 32, 8)
    assert QWEN3_8B.positions >= (1 << 18) + 384


class FakeServer:
    """Stand-in for a server. The hybrid server fails at its first start; stock starts."""

    started: list[list[str]] = []  # noqa: RUF012
    start_seconds, url, command = 1.0, "http://nowhere", ["python", "-m", "x"]

    def __init__(self, configuration: Any, flags: list[str], *_: Any) -> None:
        self._hybrid = configuration.is_hybrid
        FakeServer.started.append(flags)

    def __enter__(self) -> FakeServer:
        if self._hybrid and len(FakeServer.started) == 2:
            raise RuntimeError("CUDA out of memory")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def check(self) -> None:
        pass

    def flush_cache(self) -> None:
        pass


class FakeWatch(FakeServer):
    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> FakeWatch:
        return self

    def summary(self) -> dict[str, Any]:
        return {"gpu_mib": {"most": 20_000}, "tokens": {"most": 77}}


def test_a_refusal_is_recorded_and_a_server_that_does_not_start_is_tried_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(_url: str, prompts: list[list[int]], new: int, **_: Any) -> list[Arrivals]:
        if len(FakeServer.started) == 1:
            raise LoadError("Input length (512 tokens) exceeds the maximum allowed length (100 tokens)")
        return [Arrivals(0.0, [1.0, 2.0], [1, new]) for _ in prompts]

    write_model(tmp_path / "model", TINY, Character())
    monkeypatch.setattr(FakeServer, "started", [])
    monkeypatch.setattr(small_card, "Server", FakeServer)
    monkeypatch.setattr(small_card, "Watch", FakeWatch)
    monkeypatch.setattr(small_card, "held", lambda _url: {"pool_tokens": 100})
    monkeypatch.setattr(small_card, "send_together", send)
    flags = ["--quick", "--lengths", "512", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out.json")]
    small_card.SmallCard(small_card.parsed(flags), tmp_path).run()
    found = json.loads((tmp_path / "out.json").read_text())
    assert "exceeds the maximum" in found["points"][0]["refused"]
    stock, *_ = FakeServer.started
    assert stock[stock.index("--max-total-tokens") + 1] == str(small_card.CPU_TOKENS)  # a part of host memory
    assert "CUDA out of memory" in found["servers"][1]["error"]
    measured = found["points"][1]
    assert (measured["requests"], measured["first_token_s"], measured["tokens_per_s"]) == (1, [1.0], 15.0)
    assert measured["within_card"] is True
    assert found["servers"][2]["reserve_bytes"] > found["servers"][1]["reserve_bytes"]


def test_what_is_asked_wrongly_is_refused() -> None:
    with pytest.raises(SystemExit):
        small_card.parsed(["--runs", "stock,other"])
    assert small_card.parsed(["--lengths", "128k"]).lengths == [131072]
