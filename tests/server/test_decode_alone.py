"""A decode instance with SGLang's fake transfer, as used for measurements: no prefill instance writes its pages.

A page holds whatever was in memory before, possibly NaN. NaN must neither crash the server nor reach a later request.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disaggregated import HEALTH, assert_nothing_is_held
from host_pool import fill_pool
from real_server import STRICT, Server, run_module
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

# only in test-full: test_lifecycle.py fills pages with NaN in a server that computes its own prompts
pytestmark = pytest.mark.full
NEW_TOKENS = 6


@pytest.fixture(scope="module", params=[(), ("--hybrid", "worker=start")], ids=["default", "worker"])
def server(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (
        "--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake",
        "--hybrid", "host_memory=256MiB", "--hybrid", "budget_tokens=256", *request.param,
    )  # fmt: skip
    log = tmp_path_factory.mktemp("decode-alone") / "server.log"
    running = Server(model, "hybrid", *flags, log=log, environment=STRICT | HEALTH)
    running.start()
    try:
        running.wait_until_healthy()
        yield running
    finally:
        running.kill()  # SGLang's disaggregated instances take 20 s to end by themselves


def test_serving_is_benchmarked(server: Server, model: Path, tmp_path: Path) -> None:
    printed = run_module(
        "sglang.benchmark.serving", "--fake-prefill", "--backend", "sglang", "--base-url", server.url, "--model",
        str(model), "--tokenizer", str(model), "--dataset-name", "random-ids", "--num-prompts", "4",
        "--random-input-len", "1000", "--random-output-len", "4", "--random-range-ratio", "1", "--max-concurrency", "2",
        "--output-file", str(tmp_path / "out.jsonl"),
    )  # fmt: skip
    assert "Successful requests:                     4" in printed
    assert_nothing_is_held(server)


def test_pages_of_nan_crash_nothing_and_are_forgotten(server: Server) -> None:
    fill_pool(server, b"\xff")  # NaN in every dtype
    behind_nan = said(server, 1000)
    assert len(behind_nan["output_ids"]) == NEW_TOKENS
    assert None in logprobs(behind_nan)  # NaN is null in JSON: the filled pages were read
    fill_pool(server, b"\0")
    assert None not in logprobs(said(server, 1000))
    assert_nothing_is_held(server)


def said(server: Server, tokens: int) -> dict[str, Any]:
    return server.generate([7] * tokens, NEW_TOKENS, bootstrap_host=FAKE_BOOTSTRAP_HOST, bootstrap_room=0)


def logprobs(answer: dict[str, Any]) -> list[float | None]:
    # without the first token's, which is made up: a prefill instance would have computed it
    return [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]][1:]
