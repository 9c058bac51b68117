"""Features of stock SGLang, on a server with this backend and default settings.

Greedy answers equal those of a stock server to the same request. ``docs/features.md`` names these tests.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import tiny_models
from in_process import greedy
from openai import OpenAI
from real_server import Server

from bench.free_port import free_port
from sglang_hybrid.metrics.table import METRICS

TOLERANCE = 1e-4  # of a logprob
NEW_TOKENS = 10
STORY = "Once upon a time there was a small village by the sea, and nobody knew how old it was. " * 4  # three pages
PROMPT = STORY + "The capital of France is"
PARIS, FULL_STOP = 7042, 30  # token ids of the default model: the first two tokens of its answer
SCHEMA = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}

# Sampling parameters in addition to temperature 0, for one request each.
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    "logit-bias": {"logit_bias": {str(PARIS): -50.0, "260": 2.0}},
    "stop": {"stop": ["\n\n", " of"]},
    "stop-regex": {"stop_regex": "[,.]"},
    "stop-token-ids": {"stop_token_ids": [FULL_STOP]},
    "min-new-tokens": {"stop_token_ids": [FULL_STOP], "min_new_tokens": 6},
    "ignore-eos": {"ignore_eos": True, "no_stop_trim": True, "skip_special_tokens": False},
    "n": {"n": 3},
    # each of these two leaves a single token to sample from: greedy results from the sampling code
    "top-p": {"temperature": 1.0, "top_p": 1e-6},
    "min-p": {"temperature": 0.7, "min_p": 1.0},
    "json-schema": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": "(Paris|London), [a-z ]+"},
    "ebnf": {"ebnf": 'root ::= "yes" | "no"'},
}

FLAGS = (
    "--hybrid", "host_memory=512MiB", "--enable-metrics", "--enable-priority-scheduling",
    "--enable-return-hidden-states", "--enable-custom-logit-processor", "--enable-streaming-session",
)  # fmt: skip


@pytest.fixture(scope="module")
def hybrid(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(model, "hybrid", *FLAGS, log=tmp_path_factory.mktemp("features") / "server.log") as server:
        yield server


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    """Return the answer to a request that must succeed, or None where SGLang answers without a body."""
    reply = requests.post(f"{server.url}{path}", json=body, timeout=600)
    assert reply.ok, f"{path}: {reply.status_code}: {reply.text}"
    return reply.json() if reply.text else None


def generate(server: Server, text: str | list[str] = PROMPT, **more: Any) -> Any:
    """Return the answer of /generate. ``more``: request fields; ``sampling_params`` are added to the defaults."""
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS} | more.pop("sampling_params", {})
    return post(server, "/generate", {"text": text, "sampling_params": parameters} | more)


def told(answer: Any) -> Any:
    """Return the text, the finish reason and what matched it, of one answer or of a list of answers."""
    if isinstance(answer, list):
        return [told(one) for one in answer]
    reason = answer["meta_info"]["finish_reason"]
    return answer["text"], reason["type"], reason.get("matched")


@pytest.mark.parametrize("name", PARAMETERS)
def test_greedy_text_is_stocks(hybrid: Server, stock_server: Server, name: str) -> None:
    ours, theirs = (generate(server, sampling_params=PARAMETERS[name]) for server in (hybrid, stock_server))
    assert told(ours) == told(theirs)


def test_prompts_of_one_request_are_answered_as_by_stock(hybrid: Server, stock_server: Server) -> None:
    texts = [PROMPT, "Two plus two is", STORY]
    assert told(generate(hybrid, texts)) == told(generate(stock_server, texts))


def test_logprobs_of_prompt_and_answer_are_stocks(hybrid: Server, stock_server: Server) -> None:
    fields: dict[str, Any] = {"logprob_start_len": 0, "top_logprobs_num": 3, "token_ids_logprob": [PARIS, FULL_STOP]}
    ours, theirs = (
        generate(server, return_logprob=True, return_text_in_logprobs=True, **fields)["meta_info"]
        for server in (hybrid, stock_server)
    )
    for part in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
        for side in ("input", "output"):
            assert close(ours[f"{side}_{part}"], theirs[f"{side}_{part}"]), f"{side}_{part}"


def close(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> bool:
    """Return True if nested lists are equal; floats may differ by ``tolerance``."""
    if isinstance(theirs, list):
        same = isinstance(ours, list) and len(ours) == len(theirs)
        return same and all(close(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))
    if isinstance(theirs, float):
        return isinstance(ours, float) and abs(ours - theirs) <= tolerance
    return bool(ours == theirs)


def test_hidden_states_are_stocks(hybrid: Server, stock_server: Server) -> None:
    ours, theirs = (
        generate(server, return_hidden_states=True)["meta_info"]["hidden_states"] for server in (hybrid, stock_server)
    )
    # the first entry is of the prompt's tokens that were not cached; their number depends on the page size
    assert len(ours) == len(theirs) == NEW_TOKENS
    assert close(ours[1:], theirs[1:], tolerance=1e-3)


def test_a_custom_logit_processor_changes_text_as_with_stock(hybrid: Server, stock_server: Server) -> None:
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    processor = DisallowedTokensLogitsProcessor().to_str()
    asked: dict[str, Any] = {"sampling_params": {"custom_params": {"token_ids": [PARIS, FULL_STOP]}}}
    ours, theirs = (generate(server, custom_logit_processor=processor, **asked) for server in (hybrid, stock_server))
    assert told(ours) == told(theirs)
    assert not ours["text"].startswith(" Paris")


def test_beam_search_is_refused_with_a_sentence(hybrid: Server) -> None:
    body: dict[str, Any] = {"text": PROMPT, "sampling_params": {"beam_width": 2, "max_new_tokens": 4}}
    reply = requests.post(f"{hybrid.url}/generate", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        400, "Beam search currently requires --page-size 1.",
    )  # fmt: skip


def test_embeddings_as_input_are_refused_by_a_server_in_float32(hybrid: Server, stock_server: Server) -> None:
    """The request is refused because SGLang would end its scheduler process."""
    body: dict[str, Any] = {"input_embeds": [[0.0] * 576] * 4, "sampling_params": {"max_new_tokens": 2}}
    reply = requests.post(f"{hybrid.url}/generate", json=body, timeout=60)
    assert reply.status_code == 400
    assert "start the server with --dtype bfloat16" in reply.json()["error"]["message"]
    assert generate(hybrid)["text"] == generate(stock_server)["text"]


def test_streams_side_by_side_give_stocks_texts(
    hybrid: Server, stock_server: Server, tokenizer: Any, english: list[int]
) -> None:
    prompts = [english[n * 300 :][:length] for n, length in enumerate((20, 64, 90, 200))]

    def last(ids: list[int]) -> str:
        *_, text = hybrid.stream(ids, NEW_TOKENS)
        return text

    with ThreadPoolExecutor(len(prompts)) as pool:
        streamed = list(pool.map(last, prompts))
    assert streamed == [answer["text"] for answer in stock_server.generate_together(prompts, NEW_TOKENS)]


@pytest.mark.parametrize("streaming", [False, True], ids=["session", "streaming-session"])
def test_a_session_continues_its_own_text(hybrid: Server, stock_server: Server, streaming: bool) -> None:
    follow_up = " Another city in that country is"
    session = post(hybrid, "/open_session", {"capacity_of_str_len": 4096, "streaming": streaming})
    first = generate(hybrid, session_params={"id": session})
    second = generate(hybrid, follow_up, session_params={"id": session, "rid": first["meta_info"]["id"]})
    post(hybrid, "/close_session", {"session_id": session})
    assert first["text"] == generate(stock_server)["text"]
    assert second["text"] == generate(stock_server, PROMPT + first["text"] + follow_up)["text"]


def test_priorities_change_no_text(hybrid: Server, stock_server: Server) -> None:
    def ask(priority: int) -> str:
        return str(generate(hybrid, priority=priority)["text"])

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == {generate(stock_server)["text"]}


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_request_that_is_paused_half_way_continues_with_stocks_text(
    hybrid: Server, stock_server: Server, english: list[int], mode: str
) -> None:
    ids = english[3000:3100]
    texts: list[str] = []
    began, done = threading.Event(), threading.Event()

    def read() -> None:
        for text in hybrid.stream(ids, 2 * NEW_TOKENS):
            texts.append(text)
            began.set()
        done.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert began.wait(120)
    post(hybrid, "/pause_generation", {"mode": mode})
    post(hybrid, "/continue_generation", {})
    thread.join(240)
    assert done.is_set()
    assert texts[-1] == stock_server.generate(ids, 2 * NEW_TOKENS)["text"]


def test_an_aborted_request_ends_and_others_go_on(hybrid: Server, stock_server: Server) -> None:
    began = threading.Event()

    def abort() -> None:
        assert began.wait(120)
        post(hybrid, "/abort_request", {"rid": "to-be-aborted"})

    body: dict[str, Any] = {
        "text": STORY, "rid": "to-be-aborted", "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True},
    }  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        aborted = pool.submit(abort)
        with requests.post(f"{hybrid.url}/generate", json=body, stream=True, timeout=600) as reply:
            parts = []
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    parts.append(json.loads(line[len(b"data: ") :]))
                    began.set()
        aborted.result()
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert generate(hybrid)["text"] == generate(stock_server)["text"]


def test_texts_are_the_same_after_an_update_with_the_same_weights(
    hybrid: Server, stock_server: Server, model: Path
) -> None:
    before = generate(hybrid)["text"]
    assert post(hybrid, "/update_weights_from_disk", {"model_path": str(model)})["success"]
    assert generate(hybrid)["text"] == before == generate(stock_server)["text"]


def test_texts_are_the_same_after_memory_was_released_and_resumed(hybrid: Server, stock_server: Server) -> None:
    """Without --enable-memory-saver, which is refused, SGLang flushes the cache and keeps the memory."""
    post(hybrid, "/release_memory_occupation", {})
    post(hybrid, "/resume_memory_occupation", {})
    assert generate(hybrid)["text"] == generate(stock_server)["text"]


def test_scores_are_stocks(hybrid: Server, stock_server: Server) -> None:
    body = {
        "model": "any", "query": PROMPT, "items": [" Paris, and", " London, and"], "label_token_ids": [260, PARIS],
        "apply_softmax": True,
    }  # fmt: skip
    ours, theirs = (post(server, "/v1/score", body)["scores"] for server in (hybrid, stock_server))
    assert close(ours, theirs)


def test_embeddings_of_a_server_without_that_flag_are_refused_with_a_sentence(hybrid: Server) -> None:
    reply = requests.post(f"{hybrid.url}/v1/embeddings", json={"model": "any", "input": PROMPT}, timeout=60)
    assert reply.status_code == 400
    assert "Please add `--is-embedding` when launching the server" in reply.json()["message"]


def test_a_chat_with_a_schema_and_logprobs_is_stocks(hybrid: Server, stock_server: Server) -> None:
    def ask(server: Server) -> Any:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        form: Any = {"type": "json_schema", "json_schema": {"name": "year", "schema": SCHEMA}}
        chat: Any = [{"role": "user", "content": "When did the war end?"}]
        return client.chat.completions.create(
            model="any", messages=chat, temperature=0, max_tokens=12, response_format=form, logprobs=True
        ).choices[0]  # fmt: skip

    ours, theirs = ask(hybrid), ask(stock_server)
    assert ours.message.content == theirs.message.content
    our_logprobs, their_logprobs = ([entry.logprob for entry in choice.logprobs.content] for choice in (ours, theirs))
    assert close(our_logprobs, their_logprobs)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": PROMPT}]}),
        ("/api/generate", {"prompt": PROMPT, "stream": False, "options": {"temperature": 0, "num_predict": 8}}),
    ],
    ids=["anthropic", "ollama"],
)
def test_other_apis_give_stocks_text(hybrid: Server, stock_server: Server, path: str, body: dict[str, Any]) -> None:
    ours, theirs = (post(server, path, {"model": "any"} | body) for server in (hybrid, stock_server))
    key = "content" if path == "/v1/messages" else "response"
    assert ours[key] == theirs[key]


def test_metrics_count_what_was_asked(hybrid: Server) -> None:
    def generated() -> float:
        text = requests.get(f"{hybrid.url}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if line.startswith("sglang:generation_tokens_total{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    before = generated()
    generate(hybrid, sampling_params={"ignore_eos": True})
    hybrid.wait_for(lambda: generated() >= before + NEW_TOKENS, seconds=30)


def test_metrics_are_those_of_the_table_for_native_kernels(hybrid: Server) -> None:
    generate(hybrid, sampling_params={"ignore_eos": True})
    wanted = {name for metric in METRICS if "cpu" in metric.engines for name in metric.series}
    hybrid.wait_for(lambda: wanted <= hybrid.exported(), seconds=30)
    assert hybrid.exported() == wanted


def test_server_info_shows_the_effective_settings(hybrid: Server) -> None:
    for path in ("/get_server_info", "/server_info"):
        info = requests.get(f"{hybrid.url}{path}", timeout=60).json()
        (told,) = [state["sglang_hybrid"] for state in info["internal_states"]]
        assert (told["engine"], told["policy"], told["prediction"], told["worker"]) == ("cpu", "scout", "none", None)
        assert told["settings"]["host_memory"] == "512MiB" and told["settings"]["budget_tokens"] == 2048
        assert 0 < told["pool"]["bytes"] <= 512 << 20 and told["pool"]["tokens"] == info["max_total_num_tokens"]


# -- other servers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama")


def tiny_prompts() -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(1, tiny_models.VOCABULARY) for _ in range(length)] for length in (7, 70, 200)]


@pytest.fixture(scope="module")
def tiny_answers(tiny_llama: Path) -> list[list[int]]:
    """Return greedy tokens of stock SGLang with one rank."""
    return greedy(tiny_llama, "torch_native", tiny_prompts(), NEW_TOKENS, [[]])[0]


TINY_FLAGS = ("--skip-tokenizer-init", "--hybrid", "host_memory=256MiB")


def tokens_of(server: Server) -> list[list[int]]:
    return [server.generate(ids, NEW_TOKENS)["output_ids"] for ids in tiny_prompts()]


@pytest.mark.full
def test_two_tensor_parallel_ranks_give_stocks_tokens(
    tiny_llama: Path, tiny_answers: list[list[int]], tmp_path: Path
) -> None:
    with Server(tiny_llama, "hybrid", *TINY_FLAGS, "--tp-size", "2", log=tmp_path / "server.log") as server:
        assert tokens_of(server) == tiny_answers


@pytest.mark.full
def test_two_nodes_give_stocks_tokens(tiny_llama: Path, tiny_answers: list[list[int]], tmp_path: Path) -> None:
    """Two servers on this machine form one deployment of two nodes: each takes the other for another host."""
    flags = (*TINY_FLAGS, "--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}")
    first, second = (
        Server(tiny_llama, "hybrid", *flags, "--node-rank", str(rank), log=tmp_path / f"node{rank}.log")
        for rank in (0, 1)
    )
    with contextlib.ExitStack() as both:
        second.start()
        both.callback(second.kill)
        assert tokens_of(both.enter_context(first)) == tiny_answers


@pytest.mark.full
def test_two_replicas_give_stocks_texts(model: Path, stock_server: Server, tmp_path: Path) -> None:
    flags = ("--dp-size", "2", "--hybrid", "host_memory=512MiB")
    expected = generate(stock_server)["text"]
    with Server(model, "hybrid", *flags, log=tmp_path / "server.log") as server:
        answers = [generate(server, routed_dp_rank=rank) for rank in (0, 1)]
    assert [answer["text"] for answer in answers] == [expected] * 2
    assert [answer["meta_info"]["dp_rank"] for answer in answers] == [0, 1]


@pytest.mark.full
def test_a_mixture_of_experts_gives_stocks_tokens(tmp_path: Path) -> None:
    model = tiny_models.write_qwen3_moe(tmp_path / "moe")
    ours, theirs = (greedy(model, backend, tiny_prompts(), NEW_TOKENS, [[]]) for backend in ("hybrid", "torch_native"))
    assert ours == theirs


@pytest.mark.full
def test_embeddings_are_stocks(tiny_llama: Path, tmp_path: Path) -> None:
    """The embedding of a decoder model is the hidden state of the last token."""

    def ask(backend: str, *flags: str) -> list[Any]:
        log = tmp_path / f"{backend}.log"
        with Server(tiny_llama, backend, "--is-embedding", "--skip-tokenizer-init", *flags, log=log) as server:
            return [post(server, "/encode", {"input_ids": ids})["embedding"] for ids in tiny_prompts()]

    ours = ask("hybrid", "--hybrid", "host_memory=256MiB")
    assert close(ours, ask("torch_native", "--max-total-tokens", "4000", "--mem-fraction-static", "0.5"))


@pytest.mark.full
def test_embeddings_as_input_give_the_tokens_of_their_ids(tiny_llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    flags = (*TINY_FLAGS, "--dtype", "bfloat16", "--disable-radix-cache")
    table = load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]
    with Server(tiny_llama, "hybrid", *flags, log=tmp_path / "server.log") as server:
        of_ids = tokens_of(server)
        parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        bodies = [{"input_embeds": table[ids].tolist(), "sampling_params": parameters} for ids in tiny_prompts()]
        assert [post(server, "/generate", body)["output_ids"] for body in bodies] == of_ids


@pytest.fixture(scope="module")
def below_budget(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server with other scheduler settings, and a budget that prompts of 300 tokens exceed."""
    flags = (
        "--disable-radix-cache", "--disable-overlap-schedule", "--num-continuous-decode-steps", "2",
        "--schedule-policy", "fcfs", "--chunked-prefill-size", "64", "--hybrid", "budget_tokens=128",
        "--hybrid", "host_memory=512MiB",
    )  # fmt: skip
    with Server(model, "hybrid", *flags, log=tmp_path_factory.mktemp("other") / "server.log") as server:
        yield server


@pytest.mark.full
@pytest.mark.parametrize("name", PARAMETERS)
def test_features_work_with_a_context_beyond_the_budget(below_budget: Server, english: list[int], name: str) -> None:
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS} | PARAMETERS[name]
    body = {"input_ids": english[:300], "sampling_params": parameters, "return_logprob": True}
    answer = post(below_budget, "/generate", body)
    for one in answer if isinstance(answer, list) else [answer]:
        assert one["meta_info"]["output_token_logprobs"]


@pytest.mark.full
def test_other_choices_of_the_scheduler_give_stocks_texts(
    below_budget: Server, stock_server: Server, english: list[int]
) -> None:
    prompts = [english[n * 300 :][:length] for n, length in enumerate((20, 64, 90, 100))]  # within the budget
    ours, theirs = (server.generate_together(prompts, NEW_TOKENS) for server in (below_budget, stock_server))
    assert [answer["text"] for answer in ours] == [answer["text"] for answer in theirs]
