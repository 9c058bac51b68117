"""Fixtures that tests with real servers share: the model, servers, stock's answers, and English text."""

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
    """Append the end of each server's log to a failed test's report: on other machines nobody can open the log."""
    report = yield
    if report.failed:
        report.sections += [(f"{server.log.name} of {server.url}", server.state()) for server in Server.started]
    return report


@pytest.fixture(scope="session")
def model() -> Path:
    """Return the default model's directory; SGLANG_HYBRID_TEST_MODEL names it on hosts without the model's package."""
    given = os.environ.get("SGLANG_HYBRID_TEST_MODEL")
    return Path(given) if given else prepare_default_model()


@pytest.fixture(scope="session")
def stock_server(model: Path) -> Server:
    """Return the stock SGLang server whose answers are the reference. It sleeps while it has no requests."""
    flags = (
        # without a GPU, stock recomputes all tokens before a chunk: chunks are as long as the longest prompt
        "--max-total-tokens", "24000", "--chunked-prefill-size", "8192",
        "--mem-fraction-static", "0.5",  # SGLang's default is below zero with such chunks and 24 GiB
        "--enable-return-hidden-states", "--enable-custom-logit-processor",  # for requests that ask for them
    )  # fmt: skip

    def ask(server: Server) -> None:
        server.generate([5, 6, 7], new_tokens=2, seconds=FIRST_ANSWER_SECONDS)

    # stock has been seen to accept requests and never answer, from the first one on: made_once then starts another
    return made_once.running("stock", lambda log: Server(model, "torch_native", *flags, log=log), begin=ask)


@pytest.fixture(scope="session")
def serve(model: Path) -> Server:
    """Return a ``sglang-hybrid serve`` with default backend, model, device and dtype. The budget holds the context."""
    settings = ("--hybrid", "host_memory=1GiB", "--hybrid", "budget_tokens=8192")
    flags = ("--random-seed", "1", "--sleep-on-idle", "--chunked-prefill-size", str(CHUNK), *settings)
    return made_once.running("serve", lambda log: Server.of_command("sglang-hybrid", "serve", *flags, log=log))


@pytest.fixture(scope="module")  # so that a module's own servers start before it needs the answers
def stock_answers(request: pytest.FixtureRequest, english: list[int]) -> list[Answer]:
    """Return stock's answers to ``disaggregated.prompts``."""

    def ask() -> list[dict[str, Any]]:
        return [asdict(answer) for answer in answers(request.getfixturevalue("stock_server"), prompts(english))]

    return [Answer(**answer) for answer in made_once.answered("stock-answers", ask)]


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)


@pytest.fixture(scope="session")
def english(tokenizer: Any) -> list[int]:
    """Return token ids of half a megabyte of English: the help topics that every CPython contains."""
    from pydoc_data.topics import topics

    return list(tokenizer("\n\n".join(topics[key] for key in sorted(topics)))["input_ids"])
