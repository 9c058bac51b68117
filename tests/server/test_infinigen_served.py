"""Policy infinigen with a real server and the OpenAI client: a budget above the context gives stock's text."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI
from real_server import Server

SETTINGS = ("policy=infinigen", "infinigen.alpha=1e9", "budget_tokens=2048", "host_memory=512MiB")


@pytest.mark.full
def test_the_text_is_stocks_through_the_openai_client(
    model: Path, stock_server: Server, english: list[int], tmp_path: Path
) -> None:
    flags = [part for setting in SETTINGS for part in ("--hybrid", setting)]
    with Server(model, "hybrid", *flags, log=tmp_path / "log") as server:
        texts = []
        for asked in (server, stock_server):
            client = OpenAI(base_url=f"{asked.url}/v1", api_key="none")
            # twice: at the second request the prompt's pages and their partial keys come from the radix cache
            done = [
                client.completions.create(model="any", prompt=english[300:900], max_tokens=24, temperature=0)
                for _ in range(2)
            ]
            texts.append([one.choices[0].text for one in done])
        assert texts[0] == texts[1]
        log = server.log.read_text()
    assert "keys are not skewed: speculation is by 20 of 64 of their own channels" in log
