"""The model and the text that tests with real servers share."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from disaggregated import Answer, answers
from real_server import Server

from sglang_hybrid.default_model import prepare_default_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what its servers said: elsewhere nobody can look at their logs."""
    report = yield
    if report.failed:
        report.sections += [(f"{server.log.name} of {server.url}", server.state()) for server in Server.started]
    return report


@pytest.fixture(scope="session")
def model() -> Path:
    """The default model; SGLANG_HYBRID_TEST_MODEL names its directory on hosts without its package."""
    given = os.environ.get("SGLANG_HYBRID_TEST_MODEL")
    return Path(given) if given else prepare_default_model()


@pytest.fixture(scope="session")
def stock_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Stock SGLang, which everything is compared with. It sleeps while nobody asks."""
    # its prefill without a GPU computes all tokens before a chunk again: one chunk for every prompt
    flags = ("--max-total-tokens", "40000", "--chunked-prefill-size", "8192")
    with Server(model, "torch_native", *flags, log=tmp_path_factory.mktemp("stock") / "server.log") as server:
        yield server


@pytest.fixture(scope="module")  # so that a module's own servers start first, while another process asks
def stock_answers(request: pytest.FixtureRequest, english: list[int], tmp_path_factory: Any) -> list[Answer]:
    """What it says to the requests of the tests of disaggregation. Of two processes that run tests one asks."""
    base: Path = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    kept = shared / "stock-answers.json"
    with (shared / "stock-answers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            server: Server = request.getfixturevalue("stock_server")
            server.flush_cache()
            kept.write_text(json.dumps([asdict(answer) for answer in answers(server, english)]))
    return [Answer(**answer) for answer in json.loads(kept.read_text())]


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)


@pytest.fixture(scope="session")
def english(tokenizer: Any) -> list[int]:
    """Token ids of half a megabyte of English that every CPython has."""
    from pydoc_data.topics import topics

    return list(tokenizer("\n\n".join(topics[key] for key in sorted(topics)))["input_ids"])
