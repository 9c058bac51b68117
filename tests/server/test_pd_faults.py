"""Faults in a disaggregated set: the affected request gets an error, others do not, and no page is lost.

The first decode instance serves with policy full, and retracts a request every few steps while several run.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import requests
from disaggregated import (
    DECODE,
    HEALTH,
    LENGTHS,
    NEW_TOKENS,
    Answer,
    Set,
    answers,
    assert_nothing_is_held,
    load,
    long_prompts,
    needs_transfer_engine,
    prompts,
    started,
)
from in_process import greedy
from real_server import CHUNK, STRICT, Server

from sglang_hybrid.commands.eval.haystack import Haystack
from sglang_hybrid.commands.eval.lines import lines_prompts
from sglang_hybrid.commands.eval.needle import needle_prompts
from sglang_hybrid.commands.pd.command_lines import ENVIRONMENT

pytestmark = [needs_transfer_engine, pytest.mark.full]  # starts three more servers, which takes minutes
LONG = LENGTHS.index(700)
SHORT = LENGTHS.index(300)
BELOW_CONTEXT = "budget_tokens=1024"  # of the second decode instance, for prompts longer than 1,024 tokens
SECOND = (
    "--hybrid",
    BELOW_CONTEXT,
    "--hybrid",
    "worker=start",
)  # with a worker the torch engine computes, as in the session that answers are compared with
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


def decode_instance(model: Path, log: Path, *flags: str, **environment: str) -> Server:
    return Server(model, "hybrid", *DECODE, *flags, log=log, environment=ENVIRONMENT | HEALTH | STRICT | environment)


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Set]:
    logs = tmp_path_factory.mktemp("pd-faults")
    decode = decode_instance(model, logs / "decode.log", "--hybrid", "policy=full", **RETRACTING)
    with started(model, logs, decode) as running:
        yield running


def begin(
    servers: Set, pool: ThreadPoolExecutor, ids: list[int], new_tokens: int = NEW_TOKENS, **more: Any
) -> Future[requests.Response]:
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    } | more
    return pool.submit(requests.post, f"{servers.router.url}/generate", json=body, timeout=300)


def prefill_again(servers: Set) -> int:
    """Flush the prefill instance's cache, so that the next long prompt takes a while.

    Return the number of full chunks computed until now.
    """
    flush = f"{servers.prefill.url}/flush_cache"  # refused while requests run
    servers.prefill.wait_for(lambda: requests.post(flush, timeout=30).ok, seconds=60)
    return chunks(servers)


def chunks(servers: Set) -> int:
    return servers.prefill.log.read_text(errors="replace").count(f"#new-token: {CHUNK}")


def test_texts_with_policy_full_are_those_of_a_single_stock_server(
    servers: Set, stock_answers: list[Answer], english: list[int]
) -> None:
    assert answers(servers.router, prompts(english)) == stock_answers
    assert_nothing_is_held(servers.decode)


def test_texts_behind_long_prompts_are_those_of_a_single_stock_server(
    servers: Set, stock_server: Server, english: list[int]
) -> None:
    asked = long_prompts(english)
    assert answers(servers.router, asked) == answers(stock_server, asked)
    assert_nothing_is_held(servers.decode)


def test_retracted_requests_resume_as_if_nothing_had_been(servers: Set, english: list[int]) -> None:
    asked = prompts(english)[:4]
    with ThreadPoolExecutor(4) as pool:
        together = [begun.result() for begun in [begin(servers, pool, ids, new_tokens=40) for ids in asked]]
        alone = [begin(servers, pool, ids, new_tokens=40).result() for ids in asked[:2]]
    assert [one.json()["text"] for one in alone] == [one.json()["text"] for one in together[:2]]
    assert "#retracted_reqs: 1" in servers.decode.log.read_text(errors="replace")
    assert_nothing_is_held(servers.decode)


def test_a_request_aborted_during_transfer_gets_an_error_and_others_go_on(
    servers: Set, stock_answers: list[Answer], english: list[int]
) -> None:
    asked = prompts(english)
    before = prefill_again(servers)
    with ThreadPoolExecutor(2) as pool:
        aborted = begin(servers, pool, asked[LONG], rid="to-be-aborted")
        servers.prefill.wait_for(lambda: chunks(servers) > before)
        other = begin(servers, pool, asked[5])
        requests.post(f"{servers.decode.url}/abort_request", json={"rid": "to-be-aborted"}, timeout=30)
        failed = aborted.result()
        assert "abort" in failed.text.lower(), failed.text
        assert failed.status_code >= 400 or failed.json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert other.result().json()["text"] == stock_answers[5].text
    assert_nothing_is_held(servers.decode)


def test_a_client_that_leaves_during_transfer_leaves_nothing(servers: Set, english: list[int]) -> None:
    prefill_again(servers)
    with pytest.raises(requests.Timeout):
        requests.post(
            f"{servers.router.url}/generate",
            json={"input_ids": prompts(english)[LONG], "sampling_params": {"max_new_tokens": 4}},
            timeout=0.7,
        )
    assert_nothing_is_held(servers.decode)


def test_a_killed_decode_instance_fails_its_requests_and_another_takes_its_place(
    servers: Set, model: Path, english: list[int]
) -> None:
    ids = prompts(english)[SHORT]
    with ThreadPoolExecutor(1) as pool:
        before = begin(servers, pool, ids).result().json()["text"]
        begun = begin(servers, pool, ids, new_tokens=2000)
        servers.decode.wait_for(lambda: load(servers.decode)["num_running_reqs"] == 1)
        servers.decode.kill()
        failed = begun.result()
        assert failed.status_code >= 500, failed.text
        address = servers.decode.url
        # the second instance has policy scout and a budget above this prompt: the same text
        servers.decode = decode_instance(model, servers.decode.log.with_name("decode-2.log"), *SECOND)
        servers.decode.listen_at(int(address.rpartition(":")[2]))
        servers.decode.start()
        servers.decode.wait_until_healthy()
        servers.wait_until_ready()
        assert begin(servers, pool, ids).result().json()["text"] == before
    assert_nothing_is_held(servers.decode)


def test_with_a_budget_below_the_context_answers_are_those_of_a_single_hybrid_server(
    servers: Set, model: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs after the test above, which starts the second decode instance: its budget is below these contexts.

    Only the first resident blocks are chosen differently: by the first decoded token's query, because the query of the
    prompt's last token stayed at the prefill instance. So a token may differ; the answer that was asked for must not.
    """
    haystack = Haystack(tokenizer, "\n\n".join(topics[key] for key in sorted(topics)))
    asked = [*needle_prompts(haystack, [2000], depths=(0.3,)), *lines_prompts(haystack, [2000])]
    steps = max(prompt.new_tokens for prompt in asked)
    with ThreadPoolExecutor(len(asked)) as pool:
        begun = [begin(servers, pool, list(prompt.ids), new_tokens=steps) for prompt in asked]
        arrived = [one.result().json()["output_ids"] for one in begun]
    (single,) = greedy(model, "hybrid", [prompt.ids for prompt in asked], steps, [[BELOW_CONTEXT]])
    pairs = list(zip(single, arrived, strict=True))
    same = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True))
    with capsys.disabled():
        print(f"\nbudget 1024 behind 2,000 tokens: {same} of {len(asked) * steps} tokens as a single hybrid server's")
    for prompt, (one, other) in zip(asked, pairs, strict=True):
        for tokens in (one, other):
            assert prompt.answers[0] in tokenizer.decode(tokens), (prompt.task, prompt.depth)
    assert_nothing_is_held(servers.decode)


def test_a_prefill_instance_that_dies_fails_its_requests_and_decode_goes_on(servers: Set, english: list[int]) -> None:
    """Last test of this module: it kills the prefill instance."""
    asked = prompts(english)
    before = prefill_again(servers)
    with ThreadPoolExecutor(2) as pool:
        decoding = begin(servers, pool, asked[7], new_tokens=150)
        servers.decode.wait_for(lambda: load(servers.decode)["num_running_reqs"] == 1)
        lost = begin(servers, pool, asked[LONG])
        servers.prefill.wait_for(lambda: chunks(servers) > before)
        servers.prefill.kill()
        failed = lost.result()
        assert failed.status_code >= 500, failed.text
        print(f"prefill died: {failed.status_code} {failed.text}")
        assert decoding.result().json()["meta_info"]["completion_tokens"] == 150
    assert_nothing_is_held(servers.decode)
