"""Faults of a disaggregated set: either instance (peer) is killed or stopped, even in the middle of a transfer.

The prefill instance is stock SGLang, whose numbers depend on its batches: texts are compared, not bits, and the budget
is above the context, so that rounding changes no selection. A request that runs when a peer is killed may fail with an
error; other requests may not.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import requests

from bench.chaos.asking import Answer, ask
from bench.chaos.comparing import wrong_tokens
from bench.chaos.run import Findings, Tell
from bench.chaos.target import START_SECONDS, TargetError
from bench.chaos.workload import Request
from bench.free_port import free_port
from sglang_hybrid.commands.pd import command_lines

_CLIENTS = 4
_SETTINGS = ("budget_tokens=8192", "worker=start", "host_memory=1GiB", "worker_restart_seconds=0.3")
_QUIET = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}  # an instance that computes a long prompt is not unhealthy
_PEERS = ("prefill", "decode")


class Peers:
    """Processes of a prefill instance, a decode instance and a router. Use as a context manager."""

    def __init__(self, model: Path, layers: int, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        ports = command_lines.Ports(*(free_port() for _ in range(5)))
        both = (
            "--model-path", str(model), "--dtype", "float32", "--random-seed", "1", "--max-running-requests", "8",
            "--chunked-prefill-size", "512", "--json-model-override-args", json.dumps({"num_hidden_layers": layers}),
        )  # fmt: skip
        hybrid = tuple(part for setting in _SETTINGS for part in ("--hybrid", setting))
        flags = command_lines.Flags(
            both=both, decode=(*hybrid, "--max-total-tokens", "8192"),
            router=(
                "--health-check-interval-secs", "1", "--health-success-threshold", "1", "--disable-circuit-breaker",
            ),
        )  # fmt: skip
        self._commands = {
            "prefill": command_lines.prefill(ports, flags, gpu=False),
            "decode": command_lines.decode(ports, flags, gpu=False),
            "router": command_lines.router(command_lines.LOOPBACK, ports, flags),
        }
        self.urls = {
            name: f"http://{command_lines.LOOPBACK}:{port}"
            for name, port in (("prefill", ports.prefill), ("decode", ports.decode), ("router", ports.router))
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Peers:
        try:
            for name in _PEERS:
                self.start(name)
            for name in _PEERS:
                self.wait_until_well(name)
            self.start("router")
            self.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in tuple(self._running):
            self.kill(name)

    def start(self, name: str) -> None:
        environment = os.environ | command_lines.environment_beside(os.environ) | _QUIET | {"HF_HUB_OFFLINE": "1"}
        with (self._directory / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._commands[name], stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(process.pid).children(recursive=True)
            for one in below:
                with contextlib.suppress(psutil.Error):
                    one.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def processes(self, name: str) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error, KeyError):
            main = psutil.Process(self._running[name].pid)
            return [main, *main.children(recursive=True)]
        return []

    def wait_until_ready(self) -> None:
        self._wait_for(lambda: _healthy(f"{self.urls['router']}/readiness") == len(_PEERS), "the router to know both")

    def wait_until_well(self, name: str) -> None:
        self._wait_for(lambda: _is_well(f"{self.urls[name]}/health"), f"{name} to be healthy")

    def used_tokens(self) -> int:
        load = requests.get(f"{self.urls['decode']}/v1/loads", timeout=30).json()["loads"][0]
        return int(load["num_used_tokens"]) + int(load["num_running_reqs"])

    def _wait_for(self, condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{file.name}: {file.read_text(errors='replace')[-1500:]}" for file in self._logs())
                raise TargetError(f"waited {seconds:.0f} s for {what}:\n{logs}")
            time.sleep(0.2)

    def _logs(self) -> list[Path]:
        return sorted(self._directory.glob("*.log"))


class PeersPhase:
    def __init__(self, peers: Peers, asked: Sequence[Request], seed: int, tell: Tell) -> None:
        self._peers = peers
        self._asked = [request for request in asked if request.answers == 1 and not request.grammar]
        self._seed = seed
        self._tell = tell
        self._expected: dict[int, Answer] = {}
        self._outages = 0  # so far
        self._is_down = False
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.findings = Findings()
        self.failed_with_their_peer = 0

    def run(self, seconds: float) -> Findings:
        for request in self._asked:
            answer = ask(self._peers.urls["router"], request, logprobs=False)
            if not answer.continuations or answer.error:
                raise TargetError(f"request {request.number} has no undisturbed answer: {answer.error}")
            self._expected[request.number] = answer
        threads = [threading.Thread(target=self._client, args=(n,)) for n in range(_CLIENTS)]
        for thread in threads:
            thread.start()
        chance = random.Random(f"{self._seed}-peers")
        ends = time.monotonic() + seconds
        try:
            while time.monotonic() < ends:
                self._end.wait(chance.uniform(1.0, 8.0))
                self._one_fault(chance)
                self._tell(
                    f"peers: {self.findings.faults.total()} faults, {self.findings.answers} answers, "
                    f"{self.failed_with_their_peer} failed with their peer, {self.findings.wrong_tokens} wrong tokens"
                )
        finally:
            self._end.set()
            for thread in threads:
                thread.join()
        deadline = time.monotonic() + 60
        while (used := self._peers.used_tokens()) and time.monotonic() < deadline:
            time.sleep(0.5)
        if used:
            self.findings.leaked["tokens of the decode instance"] += used
            self.findings.examples.append(f"leaked: {used} tokens or rows of the decode instance")
        return self.findings

    def _one_fault(self, chance: random.Random) -> None:
        peer = chance.choice(_PEERS)
        kind = chance.choices(("lost", "stopped", "worker killed"), (3, 3, 2))[0]
        if kind == "lost":
            with self._lock:
                self._outages += 1
                self._is_down = True
            self._peers.kill(peer)
            self._peers.start(peer)
            self._peers.wait_until_well(peer)
            self._peers.wait_until_ready()
            with self._lock:
                self._is_down = False
        elif kind == "stopped":
            schedulers = [one for one in self._peers.processes(peer) if "scheduler" in one.name()]
            for one in schedulers:
                one.send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.1, 2.0))
            for one in schedulers:
                one.send_signal(signal.SIGCONT)
        else:
            peer = "decode"
            for one in self._peers.processes(peer):
                with contextlib.suppress(psutil.Error):
                    if "cpu_worker" in one.cmdline():
                        one.kill()
        self.findings.faults[f"{peer} instance: {kind}"] += 1

    def _client(self, number: int) -> None:
        chance = random.Random(f"{self._seed}-peers-client-{number}")
        while not self._end.is_set():
            request = chance.choice(self._asked)
            drop_after = chance.randrange(request.new_tokens) if chance.random() < 0.15 else None
            with self._lock:
                outages, down = self._outages, self._is_down
            answer = ask(self._peers.urls["router"], request, drop_after, logprobs=False)
            with self._lock:
                concerned = down or self._is_down or self._outages != outages
                self._judge(request, answer, concerned)
            if answer.error:
                self._end.wait(0.5)  # a router without a peer answers with an error at once

    def _judge(self, request: Request, answer: Answer, concerned: bool) -> None:
        found, name = self.findings, f"request {request.number} ({len(request.ids)} tokens), disaggregated"
        if answer.lost:
            found.lost += 1
            found.examples.append(f"{name}: neither answer nor error")
        elif answer.error or (answer.aborted and not answer.continuations):
            if concerned:
                self.failed_with_their_peer += 1
            else:
                found.failed += 1
                found.examples.append(f"{name}: {answer.error}")
        else:
            found.answers += 1
            found.aborted += answer.aborted
            found.tokens += sum(map(len, answer.continuations))
            if concerned and not answer.aborted and answer.ids != self._expected[request.number].ids:
                answer.aborted = True  # the answer ended with its peer: the tokens that came must be right
            if wrong := wrong_tokens(self._expected[request.number], answer, exact=False):
                found.wrong_tokens += wrong
                found.examples.append(f"{name}: {wrong} other tokens")


def _is_well(url: str) -> bool:
    try:
        return requests.get(url, timeout=60).status_code == 200
    except requests.RequestException:
        return False


def _healthy(url: str) -> int:
    try:
        return int(requests.get(url, timeout=5).json().get("healthy_workers", 0))
    except (requests.RequestException, ValueError):
        return 0
