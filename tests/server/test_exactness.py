"""Gates 1 and 2: the same answers as stock SGLang, on a real model, all servers real.

Gate 1 is policy full. Gate 2 is policy scout with everything but the sink and the tail on the CPU worker.

Stock is SGLang's ``torch_native`` backend. All servers get the same requests: prompts of 10 to 6,000 tokens alone,
prompts that continue cached ones, and eight different ones at once. Ours chunk prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from real_server import Server

LENGTHS = (10, 20, 31, 32, 33, 48, 64, 80, 96, 150, 200, 256, 300, 400, 512, 700, 1000, 1500, 3000, 6000)
CONCURRENT_LENGTHS = (15, 31, 70, 150, 333, 600, 1000, 1500)
CONTINUED = (12, 15, 17)  # of LENGTHS: long enough to leave whole pages in the radix cache
CHUNK = 2048  # the last two of LENGTHS are longer
SCORED_TOKENS = 16  # at the end of each prompt
TOLERANCE = 1e-3

HYBRID = {
    "full": ("--hybrid", "policy=full"),
    # above the model's context of 8,192 tokens: everything is selected. The deadline is long, so that a busy machine
    # does not move work from the worker into the server.
    "scout": (
        "--hybrid", "policy=scout", "--hybrid", "budget_tokens=8192", "--hybrid", "recent_blocks=0",
        "--hybrid", "resident_tokens=0", "--hybrid", "prediction=none", "--hybrid", "miss_share=0",
        "--hybrid", "worker_deadline_ms=2000", "--enable-metrics",
    ),
}  # fmt: skip


@dataclass
class Answers:
    alone: list[dict[str, Any]] = field(default_factory=list)
    continued: list[dict[str, Any]] = field(default_factory=list)
    together: list[dict[str, Any]] = field(default_factory=list)
    miss_rows: dict[str, float] = field(default_factory=dict)  # rows whose misses were served, by whom

    def all(self) -> list[dict[str, Any]]:
        return [*self.alone, *self.continued, *self.together]


def ask(server: Server, english: list[int]) -> Answers:
    prompts = []
    start = 0
    for length in (*LENGTHS, *CONCURRENT_LENGTHS):
        prompts.append(english[start : start + length])
        start += length
    alone, together = prompts[: len(LENGTHS)], prompts[len(LENGTHS) :]
    continued = [alone[n][: len(alone[n]) // 2] + english[start : start + 100] for n in CONTINUED]

    def scored(ids: list[int]) -> dict[str, Any]:
        # stock takes most of a second for each token after the longest prompts
        new_tokens = 16 if len(ids) < CHUNK else 8
        return server.generate(ids, new_tokens, logprob_start_len=max(0, len(ids) - SCORED_TOKENS))

    return Answers(
        alone=[scored(ids) for ids in alone],
        continued=[server.generate(ids) for ids in continued],
        together=server.generate_together(together),
    )


@pytest.fixture(scope="module")
def stock(stock_server: Server, english: list[int]) -> Answers:
    stock_server.flush_cache()
    return ask(stock_server, english)


@pytest.fixture(scope="module", params=HYBRID)
def hybrid(request: pytest.FixtureRequest, model: Path, english: list[int], tmp_path_factory: Any) -> Answers:
    log = tmp_path_factory.mktemp("hybrid") / "server.log"
    flags = (*HYBRID[request.param], "--hybrid", "host_memory=2GiB", "--chunked-prefill-size", str(CHUNK))
    with Server(model, "hybrid", *flags, log=log) as server:
        answers = ask(server, english)
        if "--enable-metrics" in flags:
            answers.miss_rows = server.miss_rows()
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


def test_continued_prompts_were_served_from_the_radix_cache(hybrid: Answers) -> None:
    cached = [answer["meta_info"]["cached_tokens"] for answer in hybrid.continued]
    halves = [LENGTHS[n] // 2 for n in CONTINUED]
    assert cached == [half // 32 * 32 for half in halves]


def test_policy_scout_left_everything_but_sink_and_tail_to_the_worker(hybrid: Answers) -> None:
    if not hybrid.miss_rows:
        pytest.skip("policy full has no misses")
    assert set(hybrid.miss_rows) == {"worker"}, "some rows were computed in the server process"
    assert hybrid.miss_rows["worker"] > 1000


def logprobs(answer: dict[str, Any]) -> list[tuple[float, int]]:
    """(logprob, token) of the scored prompt tokens and of all generated ones."""
    meta = answer["meta_info"]
    entries = [*meta.get("input_token_logprobs", []), *meta["output_token_logprobs"]]
    return [(entry[0], entry[1]) for entry in entries if entry[0] is not None]
