"""Gates 1 and 2: real servers with a real model answer as stock SGLang does.

Gate 1 tests ``sglang-hybrid serve`` with a budget above the context, and policy full. Gate 2 tests policy scout with
everything but the sink and the tail on the CPU worker.

Stock is SGLang's ``torch_native`` backend. All servers get the same requests: prompts of 10 to 650 tokens (3,000 in
``make test-full``) alone, prompts that continue cached ones, and six (eight) different ones at once. Only the hybrid
servers split prefill into chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import made_once
import pytest
from real_server import CHUNK, Server

from sglang_hybrid.metrics.table import METRICS

SCORED_TOKENS = 16  # tokens at the end of each prompt whose logprobs are compared
TOLERANCE = 1e-4  # of a logprob; differences seen are 1e-5


@dataclass(frozen=True)
class Requests:
    alone: tuple[int, ...]  # lengths in tokens
    continued: tuple[int, ...]  # some of ``alone``, long enough to leave whole pages in the radix cache
    together: tuple[int, ...]
    new_tokens: int


SHORT = Requests(
    alone=(10, 31, 32, 33, 80, 150, 650),
    continued=(150, 650),
    together=(15, 31, 70, 100, 150, 256),
    new_tokens=8,
)
LONG = Requests(
    alone=(20, 48, 64, 96, 200, 256, 300, 512, 700, 1000, 1500, 3000),
    continued=(300, 700, 1500),
    together=(15, 31, 70, 150, 333, 600, 1000, 1500),
    new_tokens=16,
)

SCOUT = (
    "--hybrid", "policy=scout", "--hybrid", "worker=start", "--hybrid", "budget_tokens=8192",
    "--hybrid", "recent_blocks=0", "--hybrid", "scout.resident_tokens=0", "--hybrid", "prediction=none",
    "--hybrid", "scout.min_miss_attention=0",
    # long, so that on a busy machine the worker still answers in time and the server computes nothing in its place
    "--hybrid", "worker_deadline_ms=2000", "--enable-metrics",
)  # fmt: skip
HYBRID = {"serve": (), "full": ("--hybrid", "policy=full"), "scout": SCOUT}


@dataclass
class Answers:
    alone: list[dict[str, Any]] = field(default_factory=list)
    continued: list[dict[str, Any]] = field(default_factory=list)
    together: list[dict[str, Any]] = field(default_factory=list)
    miss_rows: dict[str, float] = field(default_factory=dict)  # number of rows with misses, by what served them
    exported: list[str] = field(default_factory=list)  # names of sglang-hybrid's time series at /metrics
    info: dict[str, Any] = field(default_factory=dict)  # this backend's part of /server_info

    def all(self) -> list[dict[str, Any]]:
        return [*self.alone, *self.continued, *self.together]


def ask(server: Server, english: list[int], requests: Requests) -> Answers:
    prompts = []
    start = 0
    for length in (*requests.alone, *requests.together):
        prompts.append(english[start : start + length])
        start += length
    alone, together = prompts[: len(requests.alone)], prompts[len(requests.alone) :]
    begun = [alone[requests.alone.index(length)] for length in requests.continued]
    continued = [ids[: len(ids) // 2] + english[start : start + 100] for ids in begun]

    def scored(ids: list[int]) -> dict[str, Any]:
        # stock takes most of a second for each token after the longest prompts
        new_tokens = requests.new_tokens if len(ids) < 2048 else 8
        return server.generate(ids, new_tokens, logprob_start_len=max(0, len(ids) - SCORED_TOKENS))

    return Answers(
        alone=[scored(ids) for ids in alone],
        continued=[server.generate(ids, requests.new_tokens) for ids in continued],
        together=server.generate_together(together, requests.new_tokens),
    )


@pytest.fixture(
    scope="module", params=[pytest.param(SHORT, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.full)]
)
def asked(request: pytest.FixtureRequest) -> Requests:
    requests: Requests = request.param
    return requests


@pytest.fixture(scope="module")
def stock(stock_server: Server, english: list[int], asked: Requests) -> Answers:
    name = f"stock-exactness-{max(asked.alone)}"
    return Answers(**made_once.answered(name, lambda: asdict(ask(stock_server, english, asked))))


@contextlib.contextmanager
def server_of(name: str, request: pytest.FixtureRequest, model: Path, log: Path) -> Iterator[Server]:
    if name == "serve":
        yield request.getfixturevalue("serve")
        return
    flags = (*HYBRID[name], "--hybrid", "host_memory=2GiB", "--chunked-prefill-size", str(CHUNK))
    with Server(model, "hybrid", *flags, log=log) as server:
        yield server


# Within the budget, default settings run the code of policy full, so ``make test`` skips policy full.
CASES = [pytest.param(name, marks=pytest.mark.full) if name == "full" else name for name in HYBRID]


@pytest.fixture(scope="module", params=CASES)
def hybrid(
    request: pytest.FixtureRequest, model: Path, english: list[int], asked: Requests, tmp_path_factory: Any
) -> Answers:
    log = tmp_path_factory.mktemp("hybrid") / "server.log"
    with server_of(request.param, request, model, log) as server:
        answers = ask(server, english, asked)
        if request.param == "scout":
            answers.miss_rows = server.miss_rows()
            # metrics are published a moment after the last answer
            server.wait_for(lambda: "sglang_hybrid_worker_wait_seconds_sum" in server.exported(), seconds=30)
            answers.exported = sorted(server.exported())
            answers.info = server.info()["internal_states"][0]["sglang_hybrid"]
        return answers


def test_greedy_text_is_identical_to_stock(stock: Answers, hybrid: Answers) -> None:
    assert [answer["text"] for answer in hybrid.all()] == [answer["text"] for answer in stock.all()]


def test_token_logprobs_agree_with_stock(stock: Answers, hybrid: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    worst = 0.0
    for ours, theirs in zip(hybrid.all(), stock.all(), strict=True):
        pairs = list(zip(logprobs(ours), logprobs(theirs), strict=True))
        assert [token for (_, token), _ in pairs] == [token for _, (_, token) in pairs]
        worst = max([worst, *(abs(a - b) for (a, _), (b, _) in pairs)])
    with capsys.disabled():
        print(f"\nworst logprob difference to stock: {worst:.2e}")
    assert worst <= TOLERANCE


def test_continued_prompts_were_served_from_the_radix_cache(hybrid: Answers, asked: Requests) -> None:
    cached = [answer["meta_info"]["cached_tokens"] for answer in hybrid.continued]
    halves = [length // 2 for length in asked.continued]
    assert cached == [half // 32 * 32 for half in halves]


def test_policy_scout_left_everything_but_sink_and_tail_to_the_worker(hybrid: Answers) -> None:
    if not hybrid.miss_rows:
        pytest.skip("nothing is posted to a worker")
    rows = hybrid.miss_rows
    # a few late replies are allowed on a busy machine; a damaged reply never is
    assert rows["worker"] > max(1000, 0.95 * sum(rows.values())), rows
    assert set(rows) <= {"worker", "process-late", "process-behind"}, rows


def test_metrics_of_a_server_with_a_worker_are_those_of_the_table(hybrid: Answers) -> None:
    if not hybrid.exported:
        pytest.skip("metrics are off")
    wanted = [metric for metric in METRICS if "torch" in metric.engines and metric.when != "calibration"]
    assert hybrid.exported == sorted(name for metric in wanted for name in metric.series)


def test_server_info_tells_of_the_worker(hybrid: Answers) -> None:
    if not hybrid.info:
        pytest.skip("there is no worker")
    worker = hybrid.info["worker"]
    assert hybrid.info["engine"] == "torch" and hybrid.info["settings"]["worker"] == "start"
    assert worker["attached"] and worker["provider"] == "native" and worker["threads"] >= 1


def logprobs(answer: dict[str, Any]) -> list[tuple[float, int]]:
    """Return (logprob, token) of the scored prompt tokens and of all generated tokens."""
    meta = answer["meta_info"]
    entries = [*meta.get("input_token_logprobs", []), *meta["output_token_logprobs"]]
    return [(entry[0], entry[1]) for entry in entries if entry[0] is not None]
