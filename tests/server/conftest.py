"""The model and the text that tests with real servers share."""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import made_once
import pytest
from disaggregated import Answer, answers, prompts
from real_server import CHUNK, Server

from sglang_hybrid.commands.model import prepare_default_model

FIRST_ANSWER_SECONDS = 120


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
def stock_server(model: Path) -> Server:
    """Stock SGLang, which everything is compared with. It sleeps while nobody asks."""
    flags = (
        # its prefill without a GPU computes all tokens before a chunk again: one chunk for every prompt
        "--max-total-tokens", "24000", "--chunked-prefill-size", "8192",
        "--mem-fraction-static", "0.5",  # SGLang's own guess is below zero with such chunks and 24 GiB
        "--enable-return-hidden-states", "--enable-custom-logit-processor",  # for requests that ask for them
    )  # fmt: skip

    def ask(server: Server) -> None:
        server.generate([5, 6, 7], new_tokens=2, seconds=FIRST_ANSWER_SECONDS)

    # it has been seen to take requests for ever without a word, from the first one on
    return made_once.running("stock", lambda log: Server(model, "torch_native", *flags, log=log), begin=ask)


@pytest.fixture(scope="session")
def serve(model: Path) -> Server:
    """``sglang-hybrid serve`` with its own backend, model, device and dtype. The budget holds the context."""
    settings = ("--hybrid", "host_memory=1GiB", "--hybrid", "budget_tokens=8192")
    flags = ("--random-seed", "1", "--sleep-on-idle", "--chunked-prefill-size", str(CHUNK), *settings)
    return made_once.running("serve", lambda log: Server.of_command("sglang-hybrid", "serve", *flags, log=log))


@pytest.fixture(scope="module")  # so that a module's own servers start first, while another process asks
def stock_answers(request: pytest.FixtureRequest, english: list[int]) -> list[Answer]:
    """What stock says to the requests of the tests of disaggregation."""

    def ask() -> list[dict[str, Any]]:
        return [asdict(answer) for answer in answers(request.getfixturevalue("stock_server"), prompts(english))]

    return [Answer(**answer) for answer in made_once.answered("stock-answers", ask)]


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)


@pytest.fixture(scope="session")
def english(tokenizer: Any) -> list[int]:
    """Token ids of half a megabyte of English that every CPython has."""
    from pydoc_data.topics import topics

    return list(tokenizer("\n\n".join(topics[key] for key in sorted(topics)))["input_ids"])
