"""Policy hcattention with a real server and worker: with whole keys and all attention mass, text is stock SGLang's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from real_server import Server


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # the deadline is long enough for a busy machine
    settings = ("policy=hcattention", "hcattention.tau=1", "host_memory=512MiB", "worker_deadline_ms=2000")
    flags = [part for setting in settings for part in ("--hybrid", setting)]
    flags += ["--max-running-requests", "4", "--enable-metrics"]
    with Server(model, "hybrid", *flags, log=tmp_path_factory.mktemp("hcattention") / "log") as running:
        yield running


def said(server: Server, prompt: list[int]) -> str:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    done = client.completions.create(model="default", prompt=prompt, max_tokens=16, temperature=0)
    return done.choices[0].text


@pytest.mark.parametrize("tokens", [20, 150, 700])
def test_whole_keys_and_all_of_the_mass_give_stocks_text(
    server: Server, stock_server: Server, english: list[int], tokens: int
) -> None:
    prompt = english[1000 : 1000 + tokens]  # 16 new tokens fill the longest prompt's tail and open another block
    assert said(server, prompt) == said(stock_server, prompt)


def test_the_worker_adds_up_values(server: Server, english: list[int]) -> None:
    before = server.miss_rows().get("worker", 0)
    said(server, english[:40])
    assert server.miss_rows().get("worker", 0) > before


def test_the_start_tells_what_is_on_the_device(server: Server) -> None:
    told = re.search(r"on the model's device: (.*)", server.log.read_text())
    assert told is not None
    assert told[1].startswith("50.0 % of the KV cache (bytes of each token: 0.0 of digests, 0.0 of sketches, ")
