"""Starts, queries and ends one server of a configuration."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.free_port import free_port
from bench.side_by_side import metrics
from bench.side_by_side.configurations import Configuration
from sglang_hybrid.commands.pd.processes import ServerProcess, answers, end_all, get, wait_until
from sglang_hybrid.origin import ROOT

START_SECONDS = 400  # kernels may be compiled on the way
STREAM_INTERVAL = 8  # tokens per message: a message for every token of 64 rows keeps SGLang's HTTP process busy


class Server:
    """A server process. Use as a context manager: healthy inside, ended with all its child processes afterwards.

    To load several servers at the same time, ``start`` all and then ``wait`` for each; leaving the context ends them.
    """

    def __init__(
        self,
        configuration: Configuration,
        flags: Sequence[str],
        log: Path,
        trace_directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log, self.trace_directory = log, trace_directory
        settings = [word for setting in configuration.settings for word in ("--hybrid", setting)]
        program = "sglang_hybrid.server" if configuration.is_hybrid else "sglang.launch_server"
        self.command = [
            sys.executable, "-m", program, "--attention-backend", configuration.backend, *settings,
            "--port", str(port), *flags,
        ]  # fmt: skip
        self._environment: dict[str, str] = {"HF_HUB_OFFLINE": "1"} | dict(environment or {})
        if not configuration.is_hybrid:
            self._environment.setdefault("SGLANG_PLUGINS", "none")  # stock SGLang must not load the plugin
        self._name = configuration.name
        self.start_seconds = 0.0

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait()
        except BaseException:
            end_all([self._member])
            raise
        return self

    def start(self) -> None:
        self._begun = time.monotonic()
        paths = {"PYTHONPATH": _path_with_root()}
        self._member = ServerProcess(self._name, self.command, self.log, self._environment | paths)

    def wait(self) -> None:
        """Wait until the server is healthy. Raise what ``wait_until`` raises."""
        ready = lambda: answers(f"{self.url}/health")  # noqa: E731
        wait_until([self._member], ready, START_SECONDS, f"{self._name} did not serve")
        self.start_seconds = time.monotonic() - self._begun

    def __exit__(self, *_: object) -> None:
        end_all([self._member])

    @property
    def pid(self) -> int:
        return self._member.process.pid

    def check(self) -> None:
        self._member.check()

    def metrics(self) -> dict[str, float]:
        return metrics.parse((get(f"{self.url}/metrics") or b"").decode())

    def flush_cache(self, seconds: float = 60) -> None:
        """Empty the radix cache. SGLang refuses while requests run, so retry for up to ``seconds``."""
        wait_until([self._member], lambda: _post(f"{self.url}/flush_cache", {}), seconds, "the cache was not flushed")


def _path_with_root() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _post(url: str, body: Mapping[str, Any]) -> bool:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
