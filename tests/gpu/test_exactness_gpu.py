"""Gate 1 on a GPU: the host pool behind a model on CUDA gives stock SGLang's answers.

SGLang's CUDA kernels have no float32, so both servers run in float16 and rounding decides near
ties: texts are compared up to the first difference, and logprobs on what they share.

SGLANG_HYBRID_TEST_MODEL=DIR [SGLANG_HYBRID_RESULTS=DIR] python -m pytest tests/gpu -s
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from real_server import CHUNK, Server

from bench.record import write_result

TOLERANCE = 0.05
MODEL = os.environ.get("SGLANG_HYBRID_TEST_MODEL")
FLAGS = ("--dtype", "float16", "--sampling-backend", "pytorch", "--cuda-graph-backend-prefill", "disabled")

pytestmark = pytest.mark.skipif(not MODEL, reason="SGLANG_HYBRID_TEST_MODEL names no model directory")


def ask(backend: str, *flags: str, log: Path) -> list[dict[str, Any]]:
    from pydoc_data.topics import topics

    import test_exactness
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    english = tokenizer("\n\n".join(topics[key] for key in sorted(topics)))["input_ids"]
    chunk = ("--chunked-prefill-size", str(CHUNK))
    with Server(Path(str(MODEL)), backend, *flags, *chunk, *FLAGS, log=log) as server:
        return test_exactness.ask(server, english, test_exactness.LONG).all()


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ask("torch_native", "--max-total-tokens", "40000", log=tmp_path_factory.mktemp("stock") / "log")


@pytest.mark.parametrize("policy", ["full", "scout"])
def test_answers_agree_with_stock_up_to_rounding(policy: str, stock: list[dict[str, Any]], tmp_path: Path) -> None:
    import test_exactness

    settings = (*test_exactness.HYBRID[policy], "--hybrid", "host_memory=4GiB")
    hybrid = ask("hybrid", *settings, log=tmp_path / "log")
    identical, worst = 0, 0.0
    for ours, theirs in zip(hybrid, stock, strict=True):
        pairs = list(zip(test_exactness.logprobs(ours), test_exactness.logprobs(theirs), strict=True))
        shared = next((n for n, ((_, a), (_, b)) in enumerate(pairs) if a != b), len(pairs))
        identical += shared == len(pairs)
        worst = max([worst, *(abs(a - b) for (a, _), (b, _) in pairs[:shared])])
    measured = {"requests": len(stock), "identical_texts": identical, "worst_logprob_difference": round(worst, 5)}
    print(f"\n{policy}: {measured}")
    if results := os.environ.get("SGLANG_HYBRID_RESULTS"):
        write_result("gpu-exactness", measured, Path(results) / f"gpu-exactness-{policy}.json")
    assert worst < TOLERANCE
    assert identical >= 0.9 * len(stock)
