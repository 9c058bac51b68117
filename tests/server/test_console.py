"""``make serve`` in a terminal: few lines of output, almost no load at rest, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from real_server import START_SECONDS
from terminal import Terminal

from bench.free_port import free_port
from sglang_hybrid.commands import shared_memory

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(sys.executable).with_name("sglang-hybrid"))
CTRL_C = b"\x03"
REST_SECONDS = 5
REST_SPANS = 6
END_SECONDS = 2


class Serving(Terminal):
    """A server in a terminal, with its own port and its own directory for temporary files."""

    def __init__(self, *command: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.temporary = Path(tempfile.mkdtemp(prefix="t-"))  # short: paths of Unix sockets are limited
        flags = f"--port {self.port} --hybrid host_memory=1GiB"  # replaces the values given before
        arguments = [*command, f"ARGS={flags}"] if command[0] == "make" else [*command, *flags.split()]
        super().__init__(arguments, {"TMPDIR": str(self.temporary), "HF_HUB_OFFLINE": "1"})

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        shutil.rmtree(self.temporary)

    def wait_until_it_serves(self) -> None:
        self.wait_for(f"at {self.url}", START_SECONDS)
        self.wait_for("curl", 10)
        self.started = self.family()
        self.shared = shared_memory.files_mapped_by(process.pid for process in self.started)

    def named(self, name: str) -> psutil.Process:
        return next(process for process in self.started if name in process.name())

    def assert_nothing_is_left(self) -> None:
        _gone, alive = psutil.wait_procs(self.started, timeout=20)
        left = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert not left, [(process.pid, process.cmdline()) for process in left]
        deadline = time.monotonic() + 20
        while shared_memory.names_of(self.shared) or self.files():
            assert time.monotonic() < deadline, (shared_memory.names_of(self.shared), self.files())
            time.sleep(0.1)  # the guard of a killed launcher cleans up: there is no event to wait for

    def files(self) -> list[str]:
        # torch keeps compiled kernels between runs
        return [name for name in os.listdir(self.temporary) if not name.startswith("torchinductor")]


def patience() -> float:
    """Return how many times as long as on an idle machine a step may take, from the load average: at least 2."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)) * 2


VENV = Path(sys.executable).parents[1]
# ``-o install``: the package is installed already, or these tests would not run
MAKE_SERVE = ("make", "--no-print-directory", "-C", str(ROOT), "-o", "install", f"VENV={VENV}", "serve")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with Serving(*MAKE_SERVE) as running:
        running.wait_until_it_serves()
        yield running


def test_the_url_comes_within_fifteen_lines_in_a_frame(server: Serving) -> None:
    lines = server.lines()
    at = next(n for n, line in enumerate(lines) if server.url in line)
    assert at < 15
    assert lines[at].startswith("│") and lines[at - 1].startswith("╭") and lines[at + 1].startswith("╰")
    before = "\n".join(lines[:at])
    for fact in ("log ", "model ", "memory ", "tokens of KV cache", "policy ", "worker "):
        assert fact in before
    assert "Traceback" not in before and "Warning" not in before


def test_a_second_server_at_the_port_is_refused_in_one_sentence(server: Serving) -> None:
    done = subprocess.run(
        [PROGRAM, "serve", "--port", str(server.port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 1 and f"port {server.port} of 127.0.0.1 is in use" in done.stdout
    assert "is serving" not in done.stdout


def test_a_long_prompt_shows_how_far_it_is(server: Serving) -> None:
    body: dict[str, Any] = {"input_ids": [5 + n % 1000 for n in range(1200)], "sampling_params": {"max_new_tokens": 30}}
    requests.post(f"{server.url}/generate", json=body, timeout=600).raise_for_status()
    assert server.saw("% of 1,200 tokens")
    assert server.saw("1 running")


def test_a_resting_server_takes_less_than_two_percent_of_a_core(server: Serving) -> None:
    """The quietest of a few spans counts: other programs on the machine can only add to what a process is charged."""
    time.sleep(3)  # the server finishes work of the requests before

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in server.started)

    shares: list[float] = []
    while len(shares) < REST_SPANS and min(shares, default=1.0) >= 0.02:
        before = used()
        time.sleep(REST_SECONDS)
        shares.append((used() - before) / REST_SECONDS)
    assert min(shares) < 0.02, shares


def test_ctrl_c_under_make_ends_with_one_line_and_status_0(server: Serving) -> None:
    """Last test of the module's server: Ctrl-C ends it."""
    before = len(server.lines())
    begin = time.monotonic()
    server.type(CTRL_C)
    assert server.process.wait(60) == 0
    assert time.monotonic() - begin < END_SECONDS * patience()
    server._reader.join(5)
    assert server.lines()[before:] == ["sglang-hybrid: ending the server"]
    server.assert_nothing_is_left()


@pytest.mark.full
def test_a_killed_scheduler_ends_the_server_with_what_to_do(model: Path) -> None:
    with Serving(PROGRAM, "serve", "--model-path", str(model)) as server:
        server.wait_until_it_serves()
        before = len(server.lines())
        server.named("sglang::schedul").kill()
        assert server.process.wait(60) == 1
        server._reader.join(5)
        said = server.lines()[before:]
        assert 1 <= len(said) <= 5 and "--log-file" in said[0], said
        assert "Traceback" not in "\n".join(said)
        server.assert_nothing_is_left()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_while_the_model_loads_leaves_nothing(number: int) -> None:
    with Serving(*MAKE_SERVE) as server:
        deadline = time.monotonic() + START_SECONDS
        while not any("sglang::" in process.name() for process in server.family()):
            assert server.process.poll() is None and time.monotonic() < deadline, server.lines()
            time.sleep(0.2)  # another program starts: there is no event to wait for
        server.started = server.family()
        server.shared = shared_memory.files_mapped_by(process.pid for process in server.started)
        launcher = next(process for process in server.started if PROGRAM in process.cmdline())
        before = len(server.lines())
        begin = time.monotonic()
        launcher.send_signal(number)
        status = server.process.wait(60)
        if number == signal.SIGTERM:
            assert status == 0 and time.monotonic() - begin < END_SECONDS * patience()
            server._reader.join(5)
            said = server.lines()
            assert said[-1] == "sglang-hybrid: ending the server" and len(said) <= before + 1, said
        server.assert_nothing_is_left()
