"""The model and the text that tests with real servers share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from disaggregated import CHUNK, Answer, answers
from real_server import Server

from sglang_hybrid.default_model import prepare_default_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def model() -> Path:
    """The default model; SGLANG_HYBRID_TEST_MODEL names its directory on hosts without its package."""
    given = os.environ.get("SGLANG_HYBRID_TEST_MODEL")
    return Path(given) if given else prepare_default_model()


@pytest.fixture(scope="session")
def stock_answers(model: Path, english: list[int], tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What one stock server says to the requests of the tests of disaggregation."""
    flags = ("--max-total-tokens", "40000", "--chunked-prefill-size", str(CHUNK))
    with Server(model, "torch_native", *flags, log=tmp_path_factory.mktemp("stock") / "server.log") as server:
        return answers(server, english)


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)


@pytest.fixture(scope="session")
def english(tokenizer: Any) -> list[int]:
    """Token ids of half a megabyte of English that every CPython has."""
    from pydoc_data.topics import topics

    return list(tokenizer("\n\n".join(topics[key] for key in sorted(topics)))["input_ids"])
