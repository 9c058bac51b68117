"""A prefill instance, decode instances and a router as real processes, and the requests that go through them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from real_server import Server, free_port

from sglang_hybrid.disaggregation.commands import ENVIRONMENT


def _transfer_engine_is_missing() -> str:
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


# the library that it is linked against comes from the system's packages, which not everybody may install
needs_transfer_engine = pytest.mark.skipif(
    bool(missing := _transfer_engine_is_missing()), reason=f"mooncake cannot be loaded: {missing}"
)
# The router asks every two seconds, and an instance without a GPU would be busy with the answers. One that computes a
# long prompt would not answer in time at all.
HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
CHUNK = 2048  # stock prefill without a GPU attends to all tokens before a chunk anew, with every chunk
NEW_TOKENS = 10
# 25 different prompts and five again: whole pages, one token more or less, several chunks
LENGTHS = (
    20, 31, 32, 33, 40, 45, 50, 63, 64, 65, 70, 80, 90, 96, 97, 100, 128, 150, 200, 256, 300, 400, 700, 3000, 6000,
)  # fmt: skip
REPEATED = (0, 2, 12, 20, 22)  # of LENGTHS
PREFILL = (
    "--page-size", "32", "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake",
    "--max-total-tokens", "10000", "--disable-overlap-schedule", "--chunked-prefill-size", str(CHUNK),
)  # fmt: skip
DECODE = (
    "--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake", "--hybrid", "host_memory=1GiB",
)  # fmt: skip


def prompts(english: list[int]) -> list[list[int]]:
    different, start = [], 0
    for length in LENGTHS:
        different.append(english[start : start + length])
        start += length
    return different + [different[n] for n in REPEATED]


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: list[int]


def answers(server: Server, english: list[int]) -> list[Answer]:
    """What the prompts are continued with, eight of them at a time."""

    def ask(ids: list[int]) -> Answer:
        answer = server.generate(ids, NEW_TOKENS, return_logprob=False)
        return Answer(answer["text"], answer["output_ids"])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, prompts(english)))


@dataclass
class Set:
    """Prefill and router stay; the decode instance behind them can be another one, at the same address."""

    prefill: Server
    decode: Server
    router: Server

    def wait_until_ready(self) -> None:
        self.router.wait_for(lambda: _healthy_workers(self.router) == 2)


@contextlib.contextmanager
def started(model: Path, logs: Path, decode: Server, **prefill_environment: str) -> Iterator[Set]:
    bootstrap = free_port()
    prefill = Server(
        model, "torch_native", *PREFILL, "--disaggregation-bootstrap-port", str(bootstrap), log=logs / "prefill.log",
        environment=ENVIRONMENT | HEALTH | prefill_environment,
    )  # fmt: skip
    router = Server.of_command(
        "python", "-m", "sglang_router.launch_router", "--pd-disaggregation", "--prefill", prefill.url, str(bootstrap),
        "--decode", decode.url, "--host", "127.0.0.1", "--prometheus-port", str(free_port()), "--disable-retries",
        "--health-check-interval-secs", "2", "--health-check-timeout-secs", "60", "--health-success-threshold", "1",
        "--disable-circuit-breaker", "--policy", "round_robin", log=logs / "router.log",
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for one in (prefill, decode):
            one.start()
            stack.callback(one.kill)  # SGLang's disaggregated instances take 20 s to end by themselves
        for one in (prefill, decode):
            one.wait_until_healthy()
        stack.enter_context(router)
        running = Set(prefill, decode, router)
        running.wait_until_ready()
        try:
            yield running
        finally:
            running.decode.kill()  # may be another one by now


def load(server: Server) -> dict[str, Any]:
    answer: dict[str, Any] = requests.get(f"{server.url}/v1/loads", timeout=30).json()["loads"][0]
    return answer


def assert_nothing_is_held(server: Server) -> None:
    """No page and no row of any request is left, also not of those that failed."""
    server.wait_for(lambda: load(server)["num_running_reqs"] == 0 and load(server)["num_used_tokens"] == 0, seconds=60)
    assert "leak" not in server.log.read_text(errors="replace")
    assert server.process.poll() is None


def _healthy_workers(router: Server) -> int:
    try:
        return int(requests.get(f"{router.url}/readiness", timeout=5).json().get("healthy_workers", 0))
    except requests.RequestException:
        return 0
