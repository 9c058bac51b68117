"""Policy hgca with a real server and a real worker.

With ``beta=0`` every token that leaves the window is in the contextual set, so the worker computes attention over all
tokens outside the window, and answers equal stock's. ``test_switches.py`` tests a window above the context.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI
from real_server import CHUNK, Server

pytestmark = pytest.mark.full  # starts a server, which takes minutes; test_switches.py tests the policy in make test
FLAGS = (
    "--hybrid", "policy=hgca", "--hybrid", "hgca.window_tokens=128", "--hybrid", "hgca.beta=0",
    "--hybrid", "worker=start", "--hybrid", "host_memory=512MiB", "--chunked-prefill-size", str(CHUNK),
    # long, so that on a busy machine the worker still answers in time and the server computes nothing in its place
    "--hybrid", "worker_deadline_ms=2000", "--enable-metrics",
)  # fmt: skip
NEW_TOKENS = 40  # in every row a block leaves the window


def completion(server: Server, model: Path, ids: list[int]) -> str:
    """Return a greedy completion by the OpenAI API."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    done = client.completions.create(model=str(model), prompt=[ids], max_tokens=NEW_TOKENS, temperature=0)
    return done.choices[0].text


def test_the_worker_computes_what_the_window_lacks(
    model: Path, stock_server: Server, english: list[int], tmp_path: Path
) -> None:
    alone, together = english[:620], [english[start : start + 90 * n] for n, start in enumerate((1000, 2000, 3000), 1)]
    next_turn = alone[:320] + english[4000:4150]
    with Server(model, "hybrid", *FLAGS, log=tmp_path / "log") as server:
        for ids in (alone, next_turn):  # the beginning of the second prompt is in the radix cache
            said = server.generate(ids, NEW_TOKENS)
            assert said["text"] == stock_server.generate(ids, NEW_TOKENS)["text"]
        assert said["meta_info"]["cached_tokens"] == 320
        answers = server.generate_together(together, NEW_TOKENS)
        stock = stock_server.generate_together(together, NEW_TOKENS)
        assert [answer["text"] for answer in answers] == [answer["text"] for answer in stock]

        assert completion(server, model, alone) == completion(stock_server, model, alone)

        rows = server.miss_rows()
        # a few late replies are allowed on a busy machine; a damaged reply never is
        assert rows["worker"] > max(1000, 0.9 * sum(rows.values())), rows
        assert set(rows) <= {"worker", "process-late", "process-behind"}, rows
