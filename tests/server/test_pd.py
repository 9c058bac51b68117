"""``sglang-hybrid pd``: one command serves the same texts as a single stock server, and ends with Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import forking
import psutil
import pytest
from disaggregated import Answer, answers, long_prompts, needs_transfer_engine, prompts
from real_server import CHUNK, Server, run_module

pytestmark = needs_transfer_engine

# All blocks are selected. The worker computes all but sink and tail, from the pages that the prefill instance sent.
ABOVE_CONTEXT = (
    "budget_tokens=8192", "scout.resident_tokens=0", "recent_blocks=0", "scout.min_miss_attention=0", "prediction=none",
    "worker_deadline_ms=2000", "worker=start", "host_memory=1GiB",
)  # fmt: skip


@pytest.fixture(scope="module")
def disaggregated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    logs = tmp_path_factory.mktemp("pd")
    hybrid = [part for setting in ABOVE_CONTEXT for part in ("--hybrid", setting)]
    command = Server.of_command(
        "sglang-hybrid", "pd", "--model-path", str(model), "--random-seed", "1", "--max-running-requests", "8",
        "--log-dir", str(logs), f"--prefill=--chunked-prefill-size {CHUNK} --max-total-tokens 10000", *hybrid,
        log=logs / "pd.log", environment=forking.environment(),
    )  # fmt: skip
    with command as running:
        running.wait_for_log("sglang-hybrid is serving")
        yield running


def test_texts_are_those_of_a_single_stock_server(
    disaggregated: Server, stock_answers: list[Answer], english: list[int]
) -> None:
    assert answers(disaggregated, prompts(english)) == stock_answers


@pytest.mark.full
def test_texts_behind_long_prompts_are_those_of_a_single_stock_server(
    disaggregated: Server, stock_server: Server, english: list[int]
) -> None:
    asked = long_prompts(english)
    assert answers(disaggregated, asked) == answers(stock_server, asked)


def test_serving_is_benchmarked_through_the_router(disaggregated: Server, model: Path, tmp_path: Path) -> None:
    printed = run_module(
        "sglang.benchmark.serving", "--backend", "sglang-oai", "--base-url", disaggregated.url, "--model", str(model),
        "--tokenizer", str(model), "--dataset-name", "random-ids", "--num-prompts", "8", "--random-input-len", "128",
        "--random-output-len", "8", "--random-range-ratio", "1", "--max-concurrency", "4", "--output-file",
        str(tmp_path / "out.jsonl"),
    )  # fmt: skip
    assert "Successful requests:                     8" in printed


def test_ctrl_c_ends_all_of_them(disaggregated: Server) -> None:
    """Last test of this module: it ends the servers."""
    family = disaggregated.family()
    assert len(family) > 6  # three programs with the processes that SGLang spawns, and a worker
    # a background job of a shell, such as this test run, ignores SIGINT, and its children inherit that
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    disaggregated.own_process.send_signal(signal.SIGTERM if ignored else signal.SIGINT)
    assert disaggregated.own_process.wait(60) == 0
    _gone, alive = psutil.wait_procs(family, timeout=20)
    # zombies have ended: only their parent has not read their status yet
    left = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not left, [(process.pid, process.cmdline()) for process in left]
