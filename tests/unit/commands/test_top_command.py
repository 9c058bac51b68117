"""``sglang-hybrid top`` from the command line: output for scripts, refusals, and the page's HTTP server."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import requests
import uvicorn
from fake_metrics_server import FakeServer

from sglang_hybrid.commands.arguments import Refused
from sglang_hybrid.commands.top import main as top
from sglang_hybrid.commands.top import web
from sglang_hybrid.commands.top.server import Server
from sglang_hybrid.commands.top.watch import Watch

SECONDS = 60  # timeout of every wait: a busy machine is slow


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def test_once_prints_json_with_rates_and_settings(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["--once", "--json", "--interval", "0.1", "--url", fake.url]) == 0
    printed = capsys.readouterr()
    state = json.loads(printed.out)
    assert printed.err == ""
    assert [point["answered"] for point in state["points"]] == [True, True]
    assert state["points"][-1]["gb_per_s"].keys() == {"worker", "gather", "device", "recall"}
    assert state["problem"] is None and state["settings"]["budget_tokens"] == "2048"
    assert state["latest"]["workers"] == [{"replica": "0", "rank": "0", "up": True, "starts": 1, "degraded": False}]


def test_once_without_json_prints_the_panels(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["--once", "--interval", "0.1", "--url", fake.url]) == 0
    assert "CPU compute ratio" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_once_fails_with_a_sentence_where_no_server_is(
    fake: FakeServer, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake.stop()
    assert top.main(["--once", *flags, "--url", fake.url]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"sglang-hybrid top: no server answers at {fake.url} (connection refused).")
    assert not flags or json.loads(printed.out)["problem"]["kind"] == "no-answer"


def test_once_tells_scripts_about_stock_sglang(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.hybrid, fake.info = False, {"attention_backend": "triton"}
    assert top.main(["--once", "--json", "--interval", "0.1", "--url", fake.url]) == 1
    printed = capsys.readouterr()
    assert "is stock SGLang (attention backend triton)" in printed.err
    assert json.loads(printed.out)["points"][-1]["running"] == 16


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--json"], "add --once"),
        (["--once", "--web"], "choose one of them"),
        (["--once", "--interval", "0"], "--interval 0 must be between"),
        (["--once", "--interval", "nan"], "--interval nan must be between"),
        ([], "standard output is no terminal: add --once"),
        (["--once", "--url", "file:///etc/passwd"], "is no address of a server"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert top.main(flags) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::"])  # noqa: S104
def test_a_wildcard_address_is_refused_unless_asked_for_by_name(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refused, match="--all-interfaces"):
        web.check_address(host, all_interfaces=False)
    assert capsys.readouterr().err == ""
    web.check_address(host, all_interfaces=True)
    assert "warning: the page has no password" in capsys.readouterr().err


def test_addresses_of_this_machine_alone_need_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        web.check_address(host, all_interfaces=False)
    assert capsys.readouterr().err == ""
    web.check_address("192.0.2.1", all_interfaces=False)
    assert "warning: the page has no password" in capsys.readouterr().err


def test_an_address_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Refused, match="--host is empty"):
        web.check_address("", all_interfaces=True)
    with pytest.raises(Refused, match="no such address"):
        web.check_address("no-such-name.invalid", all_interfaces=False)


def test_a_busy_port_is_refused(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["--web", "--port", str(fake.port)]) == 2
    assert f"port {fake.port} of 127.0.0.1 is in use" in capsys.readouterr().err


@pytest.fixture
def page(fake: FakeServer) -> Iterator[str]:
    """Yield the URL of a page server in this process. Its watch has taken two readings."""
    watch = Watch(Server.at(fake.url), 2.0)
    for _ in range(2):
        fake.engine.advance(1)
        watch.poll(ask_info=False)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(web.page_app(watch, "127.0.0.1"), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(SECONDS)
    listener.close()


def get(url: str, **headers: str) -> requests.Response:
    return requests.get(url, headers=headers, timeout=SECONDS)


def test_the_api_gives_points_after_the_one_that_a_page_has(page: str) -> None:
    assert [point["number"] for point in get(f"{page}/api/state").json()["points"]] == [1, 2]
    assert [point["number"] for point in get(f"{page}/api/state?after=1").json()["points"]] == [2]
    assert get(f"{page}/api/state?after=x").status_code == 422


def test_the_page_may_load_nothing_from_elsewhere(page: str) -> None:
    for path, (name, kind) in web.FILES.items():
        answer = get(page + path)
        assert answer.text == (web.PAGE / name).read_text()
        assert answer.headers["Content-Type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "https://" not in answer.text and "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    assert {file.name for file in web.PAGE.iterdir()} == {name for name, _kind in web.FILES.values()}


def test_requests_for_another_name_are_refused(page: str) -> None:
    assert get(f"{page}/api/state", Host="evil.example").status_code == 403
    assert get(f"{page}/api/state", Host="localhost:1234").status_code == 200
    assert get(f"{page}/api/state", Host="[::1]:1234").status_code == 200


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/../watch.py", "/page/top.js"])
def test_nothing_else_is_served(page: str, path: str) -> None:
    assert get(page + path).status_code == 404


def test_the_terminal_view_shows_the_server_and_ends_with_q(fake: FakeServer) -> None:
    """The view runs in a real terminal of 120 columns and restores the terminal's screen."""
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    command = [sys.executable, "-m", "sglang_hybrid.cli", "top", "--interval", "0.1", "--url", fake.url]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, env=environment)
    try:
        os.close(follower)
        written = _read_until(leader, "CPU compute ratio")
        assert "Qwen3-14B" in written and "\x1b[?1049h" in written
        fake.stop()
        _read_until(leader, "no answer since")
        os.write(leader, b"q")
        assert "\x1b[?1049l" in _read_until(leader, "\x1b[?1049l")
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_ctrl_c_ends_the_page_server(fake: FakeServer) -> None:
    command = [sys.executable, "-m", "sglang_hybrid.cli", "top", "--web", "--port", "0", "--url", fake.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().split(" at ")[1].split()[0]
        assert get(url).ok
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) in (0, 130)
        assert "Traceback" not in process.stderr.read()


def _read_until(terminal: int, words: str) -> str:
    written, deadline = "", time.monotonic() + SECONDS
    while words not in written:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no {words!r} in {written[-2000:]!r}"
        written += os.read(terminal, 1 << 16).decode(errors="replace")
    return written
