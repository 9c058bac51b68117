"""Clients of ``examples``, against a server that ``sglang-hybrid serve`` started."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_server import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
# Python of an environment with langchain-openai, which needs another version of openai than SGLang
LANGCHAIN = os.environ.get("SGLANG_HYBRID_TEST_LANGCHAIN") or sys.executable
DOCUMENT = "The harbour of Marvik was built in 1874 by Ida Brandt. " * 3 + "Its lighthouse is green."
QUESTION = "Who built the harbour of Marvik?"


def has_langchain() -> bool:
    return sys.executable != LANGCHAIN or importlib.util.find_spec("langchain_openai") is not None


def run(python: str, example: str, server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, str(EXAMPLES / example / "ask_document.py"), *arguments, "--url", f"{server.url}/v1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "document.txt"
    path.write_text(DOCUMENT)
    return str(path)


def test_the_openai_example_answers_from_its_document(serve: Server, document: str) -> None:
    said = run(sys.executable, "openai_client", serve, document, QUESTION, QUESTION, "--max-tokens", "32")
    first, second = said.stdout.splitlines()
    assert "Brandt" in first
    assert second == first  # the second answer uses the prefix cache
    told = said.stderr.splitlines()
    assert len(told) == 2 and all("of answer, first one after" in line for line in told)


@pytest.mark.skipif(not has_langchain(), reason="no langchain-openai here: it wants another openai than SGLang")
def test_the_langchain_example_answers_from_its_document(serve: Server, document: str) -> None:
    said = run(LANGCHAIN, "langchain", serve, document, QUESTION, "--max-tokens", "32")
    assert "Brandt" in said.stdout
