"""A worker started by ``sglang-hybrid worker``, with another provider, gives the same answers as stock.

``make test-ipex`` sets another Python environment and provider ipex. Otherwise this environment and provider torch are
used. Provider torch is slow, so the tests run in ``make test-full`` only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import CHUNK, Server
from test_exactness import SCOUT, TOLERANCE, Answers, Requests, ask, logprobs

PYTHON = Path(os.environ.get("SGLANG_HYBRID_TEST_WORKER_PYTHON") or sys.executable)
PROVIDER = os.environ.get("SGLANG_HYBRID_TEST_WORKER_PROVIDER") or "torch"
ASKED = Requests(alone=(10, 33, 150, 650), continued=(650,), together=(15, 70, 256), new_tokens=8)

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def worker() -> Iterator[Path]:
    """Yield the directory of a worker that waits for a server."""
    directory = Path(tempfile.mkdtemp(prefix="shw-"))
    command = [str(PYTHON.with_name("sglang-hybrid")), "worker", "--dir", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("waiting for a server")
        yield directory
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def hybrid(
    worker: Path, model: Path, english: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Answers, str]]:
    """Yield answers and log of a server that leaves all blocks but sink and tail to the worker."""
    log = tmp_path_factory.mktemp("by-hand") / "server.log"
    mine = (f"worker={worker}", f"worker_provider={PROVIDER}", "host_memory=1GiB")
    flags = (
        *SCOUT,
        *(part for setting in mine for part in ("--hybrid", setting)),
        "--chunked-prefill-size",
        str(CHUNK),
    )
    with Server(model, "hybrid", *flags, log=log) as server:
        answers = ask(server, english, ASKED)
        answers.miss_rows = server.miss_rows()
        yield answers, log.read_text()


@pytest.fixture(scope="module")
def stock(stock_server: Server, english: list[int]) -> Answers:
    return ask(stock_server, english, ASKED)


def test_answers_of_the_provider_are_those_of_stock(hybrid: tuple[Answers, str], stock: Answers) -> None:
    ours, _ = hybrid
    assert [answer["text"] for answer in ours.all()] == [answer["text"] for answer in stock.all()]
    for mine, theirs in zip(ours.all(), stock.all(), strict=True):
        for (a, token), (b, other) in zip(logprobs(mine), logprobs(theirs), strict=True):
            assert token == other and abs(a - b) <= TOLERANCE


def test_the_provider_that_was_asked_for_computed_them(hybrid: tuple[Answers, str]) -> None:
    answers, log = hybrid
    assert f"serves: provider {PROVIDER} " in log
    rows = answers.miss_rows
    assert rows["worker"] > 0.95 * sum(rows.values()), rows
