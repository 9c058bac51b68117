"""bench/pd_load.py without servers: refusals, capacity, statistics of arrivals, and requests to both instances."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench import gpu_pd, pd_load
from bench.pd import transfer
from bench.pd.asking import ask_both
from bench.pd.figures import admitted_per_s, batch_figures, pause_figures
from bench.pd.instances import instance_flags
from bench.side_by_side.load import rows_of
from bench.side_by_side.statistics import Arrivals
from bench.synthetic_model import TINY, Character, write_model


def test_a_transfer_backend_that_is_not_installed_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(transfer.NEEDED, "nixl", ("no_such_module", "pip install nixl nixl_cu13"))
    with pytest.raises(SystemExit, match=r"no_such_module.*pip install nixl nixl_cu13"):
        transfer.require_transfer("nixl")
    with pytest.raises(SystemExit, match="take one of nixl, mooncake"):
        transfer.require_transfer("carrier-pigeon")


@pytest.mark.parametrize("program", [pd_load, gpu_pd])
def test_help_says_what_has_to_be_installed(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.parsed(["--help"])
    assert "nixl_cu13" in " ".join(capsys.readouterr().out.split())


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(SystemExit):
        pd_load.parsed(["--parts", "alone,together"])


def test_as_many_requests_run_as_memory_holds(tmp_path: Path) -> None:
    write_model(tmp_path / "model", TINY, Character())
    flags = ["--model", str(tmp_path / "model"), "--device", "cpu", "--input", "256", "--new-tokens", "128"]
    args = pd_load.parsed([*flags, "--gpu-limit", "0.004", "--host-limit", "1", "--rows", "9"])
    load = pd_load.PdLoad(args, tmp_path)
    hybrid, stock = args.configurations
    tokens = int(0.004e9) // (TINY.layers * TINY.kv_heads * TINY.head_dim * 2 * 4)
    assert (load._rows(hybrid), load._rows(stock)) == (9, tokens // (256 + 128 + 128))
    assert "--max-total-tokens" in load._decode_flags(stock) and "host_memory=1.0GB" in load._decode_flags(hybrid)
    # rows for running and for arriving requests
    flags = load._decode_flags(stock)
    assert flags[flags.index("--max-running-requests") + 1] == "12"


def test_both_instances_have_pages_of_one_size_and_one_port_to_meet() -> None:
    flags = instance_flags("decode", "nixl", 4711)
    assert flags[flags.index("--page-size") + 1] == "32" and "4711" in flags


# -- figures -----------------------------------------------------------------------------------------------------------


def row(sent: float, first: float, every: float, tokens: int) -> Arrivals:
    return Arrivals(sent, [first + every * n for n in range(tokens)], list(range(1, tokens + 1)))


def test_requests_are_admitted_from_the_first_first_token_to_the_last() -> None:
    rows = [row(0, 1.0, 0.01, 500), row(0, 2.0, 0.01, 500), row(0, 3.0, 0.01, 500)]
    assert admitted_per_s(rows) == 1.0 and admitted_per_s(rows[:1]) is None
    found = batch_figures(rows)
    assert found["first_token_s"] == {"least": 1.0, "median": 2.0, "most": 3.0}
    assert found["tokens_per_s"] == pytest.approx(300) and found["step_ms"] == pytest.approx(10)


def test_answers_that_never_overlap_have_no_rate() -> None:
    found = batch_figures([row(0, 1.0, 0.01, 10), row(0, 9.0, 0.01, 10)])
    assert found["tokens_per_s"] is None and found["step_ms"] is None


def test_pauses_count_from_the_arrival_until_all_others_have_begun() -> None:
    # a pause of 3 s before other requests arrive, one of 0.5 s while they arrive, one of 2 s afterwards
    times = [0.0, 3.0, 4.0, 4.1, 4.6, 4.7, 6.7]
    running = [Arrivals(0.0, times, list(range(1, 8)))]
    found = pause_figures(running, [row(4.05, 4.5, 0.1, 3), row(4.05, 4.65, 0.1, 3)])
    assert (found["longest_pause_s"], found["longest_pause_before_s"]) == (0.5, 3.0)
    assert found["running_to_the_end"] == 1 and found["first_token_s"]["most"] == 0.6


# -- requests ----------------------------------------------------------------------------------------------------------


class FakeInstance:
    """HTTP server that streams answers as SGLang does and records the requests."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        return runner

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        reply = web.StreamResponse()
        await reply.prepare(request)
        for n in range(body["sampling_params"]["max_new_tokens"]):
            event = {"output_ids": list(range(n + 1)), "meta_info": {"completion_tokens": n + 1}}
            await reply.write(f"data: {json.dumps(event)}\n\n".encode())
        await reply.write(b"data: [DONE]\n\n")
        return reply


def test_a_request_goes_to_both_instances_with_the_same_room() -> None:
    import aiohttp

    prefill, decode = FakeInstance(), FakeInstance()

    async def run() -> list[Arrivals]:
        runners = [await one.start() for one in (prefill, decode)]
        pair: Any = type("Pair", (), {"prefill": prefill, "decode": decode, "bootstrap": 4711})
        try:
            async with aiohttp.ClientSession() as session:
                return await rows_of(session, ask_both(pair, [[1, 2], [3, 4]], 5), 2)
        finally:
            for runner in runners:
                await runner.cleanup()

    rows = asyncio.run(run())
    assert [one.tokens[-1] for one in rows] == [5, 5]

    def rooms(one: FakeInstance) -> list[int]:
        return sorted(body["bootstrap_room"] for body in one.asked)

    assert rooms(prefill) == rooms(decode) and len(set(rooms(decode))) == 2
    assert {body["bootstrap_port"] for body in decode.asked} == {4711}
