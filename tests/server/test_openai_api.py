"""``sglang-hybrid serve``, used by the official OpenAI client and by SGLang's own serving benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from real_server import Server, run_module

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def client(serve: Server) -> OpenAI:
    return OpenAI(base_url=f"{serve.url}/v1", api_key="none")


def test_the_start_says_where_the_server_is_and_how_to_try_it(serve: Server) -> None:
    serve.wait_for_log(f"sglang-hybrid is serving {MODEL} at {serve.url}")
    serve.wait_for_log(f"curl {serve.url}/v1/completions")


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_the_capital_of_france_is_paris(client: OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert done.choices[0].text.startswith(" Paris")


def test_a_chat_is_answered(client: OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is 2+2?"}], max_tokens=24, temperature=0
    )
    assert "4" in (done.choices[0].message.content or "")


def test_a_streamed_chat_gives_the_same_text_in_pieces(client: OpenAI) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**request).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**request, stream=True)]
    assert len(pieces) > 3
    assert "".join(pieces) == whole


def test_sampling_with_a_seed_works(client: OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=1.0, seed=7)
    assert done.choices[0].text


def test_sglangs_serving_benchmark_runs_against_it(serve: Server, model: Path, tmp_path: Path) -> None:
    printed = run_module(
        "sglang.benchmark.serving", "--backend", "sglang", "--base-url", serve.url, "--model", str(model),
        "--tokenizer", str(model), "--dataset-name", "random-ids", "--num-prompts", "6", "--random-input-len", "64",
        "--random-output-len", "8", "--output-file", str(tmp_path / "result.jsonl"),
    )  # fmt: skip
    assert "Successful requests:                     6" in printed
