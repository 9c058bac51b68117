"""Nothing leaks: a server that goes on loses no pages or rows; a killed server leaves no processes or shared memory."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from host_pool import fill_pool
from real_server import STRICT, Server

from sglang_hybrid.commands import shared_memory

POOL_TOKENS = 1024


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("lifecycle") / "server.log"
    flags = (
        "--hybrid", "host_memory=1GiB", "--hybrid", "budget_tokens=256", "--max-total-tokens", str(POOL_TOKENS),
        "--chunked-prefill-size", "256", "--enable-metrics", "--schedule-conservativeness", "0.01",
    )  # fmt: skip
    # SGLang estimates one new token per request, so it admits more than the pool holds and retracts some later
    environment = {**STRICT, "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}
    with Server(model, "hybrid", *flags, log=log, environment=environment) as running:
        yield running


def in_use(server: Server) -> tuple[int, int]:
    """Return SGLang's counts of tokens in the pool that are not free, and of running requests."""
    load = requests.get(f"{server.url}/v1/loads", timeout=30).json()["loads"][0]
    return load["num_used_tokens"], load["num_running_reqs"]


def wait_until_idle(server: Server) -> None:
    deadline = time.monotonic() + 60
    while in_use(server)[1]:
        assert time.monotonic() < deadline, "requests still run a minute after they were dropped"
        time.sleep(0.2)  # no event tells a client that the scheduler is idle


def assert_nothing_leaked(server: Server) -> None:
    wait_until_idle(server)
    server.flush_cache()
    assert in_use(server) == (0, 0)
    # with a lost page or row, all rows together could not fill the pool
    answers = server.generate_together([[n + 3] * (POOL_TOKENS // 8 - 32) for n in range(8)], new_tokens=2)
    assert len(answers) == 8
    wait_until_idle(server)
    server.flush_cache()
    assert in_use(server) == (0, 0)
    assert "leak" not in server.log.read_text()
    assert server.process.poll() is None


def test_requests_aborted_mid_stream_leave_no_page_and_no_row(server: Server, english: list[int]) -> None:
    def start_and_drop(n: int) -> None:
        body: dict[str, Any] = {
            "input_ids": english[n * 300 : n * 300 + 100],
            "sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True},
            "stream": True,
        }
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=60) as reply:
            for seen, _ in enumerate(reply.iter_lines()):
                if seen > n:  # drops some requests in prefill, some after a few tokens
                    return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(start_and_drop, range(12)))
    assert_nothing_leaked(server)


def test_retracted_requests_are_answered_as_if_alone_and_leave_nothing(server: Server, english: list[int]) -> None:
    # Six requests need 6 x (120 + 64) tokens, more than the pool has. The budget holds each context: beyond the budget
    # a retracted request repeats its exact first steps, and its answer may differ.
    prompts = [english[5000 + n * 400 : 5000 + n * 400 + 120] for n in range(8)]
    together = server.generate_together(prompts, new_tokens=64)
    retracted = retractions(server)
    assert retracted > 0
    server.flush_cache()
    undisturbed = [answer for n in (0, 4) for answer in server.generate_together(prompts[n : n + 4], new_tokens=64)]
    assert retractions(server) == retracted
    assert [answer["text"] for answer in together] == [answer["text"] for answer in undisturbed]
    assert [len(answer["meta_info"]["output_token_logprobs"]) for answer in together] == [64] * 8
    assert_nothing_leaked(server)


def test_flushing_the_cache_frees_what_finished_requests_left(server: Server, english: list[int]) -> None:
    server.generate(english[9000:9500])
    wait_until_idle(server)
    cached = server.generate(english[9000:9500])["meta_info"]["cached_tokens"]
    assert cached == 480
    server.flush_cache()
    assert server.generate(english[9000:9500])["meta_info"]["cached_tokens"] == 0
    assert_nothing_leaked(server)


def test_what_was_in_the_pool_before_reaches_no_request(server: Server, english: list[int]) -> None:
    prompts = [english[12000 + n * 100 :][: 50 + 17 * n] for n in range(4)]  # each prompt ends in a partly filled page
    before = [answer["text"] for answer in server.generate_together(prompts, new_tokens=8)]
    server.flush_cache()
    fill_pool(server, b"\xff")  # NaN in every dtype
    assert [answer["text"] for answer in server.generate_together(prompts, new_tokens=8)] == before
    assert_nothing_leaked(server)


def test_a_killed_server_leaves_no_process_and_nothing_in_shared_memory(server: Server) -> None:
    """Last test of this module: it ends the server."""
    family = server.family()
    shared = shared_memory.files_mapped_by(process.pid for process in family)
    pools = {pool for process in family for pool in pools_of(process)}
    assert len(pools) == 1
    server.own_process.send_signal(signal.SIGKILL)
    server.own_process.wait(30)
    _gone, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, [(process.pid, process.cmdline()) for process in alive]
    assert not shared_memory.names_of(shared)
    assert not [process for process in psutil.process_iter() if pools & pools_of(process)]


def retractions(server: Server) -> int:
    return server.log.read_text().count("Retract requests")


def pools_of(process: psutil.Process) -> set[str]:
    """Return the inodes of the KV pools that a process maps; empty if the process has ended."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:  # the process has ended
        return set()
    return {line.split()[4] for line in maps.splitlines() if "memfd:sglang-hybrid-kv" in line}
