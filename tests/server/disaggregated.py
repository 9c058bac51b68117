"""A prefill instance, decode instances and a router as real processes, and the requests that go through them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from real_server import CHUNK, Server

from bench.free_port import free_port
from sglang_hybrid.commands.pd.command_lines import ENVIRONMENT


def _transfer_engine_is_missing() -> str:
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


# mooncake needs system libraries, which not every user may install
needs_transfer_engine = pytest.mark.skipif(
    bool(missing := _transfer_engine_is_missing()), reason=f"mooncake cannot be loaded: {missing}"
)
# Health checks must not generate tokens: the router checks every two seconds, an instance without a GPU would be busy
# with nothing else, and an instance that computes a long prompt would answer too late.
HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
NEW_TOKENS = 8
# Lengths of 14 different prompts: whole pages, one token more or less, several chunks. Three are asked twice.
LENGTHS = (20, 31, 32, 33, 45, 63, 64, 65, 80, 97, 128, 200, 300, 700)
REPEATED = (0, 2, 12)  # indices into LENGTHS
LONG_LENGTHS = (40, 50, 70, 90, 96, 100, 150, 256, 400, 1500, 2200)  # for make test-full
PREFILL = (
    "--page-size", "32", "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake",
    "--max-total-tokens", "10000", "--disable-overlap-schedule", "--chunked-prefill-size", str(CHUNK),
)  # fmt: skip
DECODE = (
    "--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake", "--hybrid", "host_memory=1GiB",
)  # fmt: skip


def prompts(english: list[int]) -> list[list[int]]:
    different = _parts(english, LENGTHS)
    return different + [different[n] for n in REPEATED]


def long_prompts(english: list[int]) -> list[list[int]]:
    return _parts(english[sum(LENGTHS) :], LONG_LENGTHS)


def _parts(english: list[int], lengths: Sequence[int]) -> list[list[int]]:
    ends = list(itertools.accumulate(lengths))
    return [english[end - length : end] for end, length in zip(ends, lengths, strict=True)]


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: list[int]


def answers(server: Server, asked: Sequence[list[int]]) -> list[Answer]:
    """Return the server's answers to the prompts, in their order. Eight requests run at a time."""

    def ask(ids: list[int]) -> Answer:
        # without a GPU, prefill recomputes all tokens before a chunk: minutes for the longest prompt
        answer = server.generate(ids, NEW_TOKENS, seconds=1800, return_logprob=False)
        return Answer(answer["text"], answer["output_ids"])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, asked))


@dataclass
class Set:
    """A running disaggregated set. A test may replace the decode instance by another one at the same address."""

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
            running.decode.kill()  # a test may have replaced the first one


def load(server: Server) -> dict[str, Any]:
    answer: dict[str, Any] = requests.get(f"{server.url}/v1/loads", timeout=30).json()["loads"][0]
    return answer


def assert_nothing_is_held(server: Server) -> None:
    """Assert that the server runs and that no request, finished or failed, still holds a page or a row."""
    server.wait_for(lambda: load(server)["num_running_reqs"] == 0 and load(server)["num_used_tokens"] == 0, seconds=60)
    assert "leak" not in server.log.read_text(errors="replace")
    assert server.process.poll() is None


def _healthy_workers(router: Server) -> int:
    try:
        return int(requests.get(f"{router.url}/readiness", timeout=5).json().get("healthy_workers", 0))
    except requests.RequestException:
        return 0
