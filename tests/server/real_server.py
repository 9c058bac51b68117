"""Real SGLang servers for tests: started by a command line and asked over HTTP, as by a user."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import forking
import psutil
import requests
import torch

from bench.free_port import free_port

START_SECONDS = 300
ANSWER_SECONDS = 600  # for the longest prompt, on shared cores
STOP_SECONDS = 30
CHUNK = 512  # tokens of a prefill chunk, where tests want prefill in several chunks
# SGLang checks its page and row bookkeeping at every step and when idle, and ends with an error on a mismatch.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}

# Flags that make a server small, its arithmetic comparable between backends, and let it sleep while another works.
# On shared cores one prefill chunk may take minutes: with SGLang's watchdog of 300 s the server would end itself.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_COMMON = (
    "--device", DEVICE, "--dtype", "float32", "--random-seed", "1", "--max-running-requests", "8", "--sleep-on-idle",
    "--watchdog-timeout", "1800",
)  # fmt: skip


class _StartedElsewhere:
    """Stand-in for the ``Popen`` of a server that another process started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        return None if psutil.pid_exists(self.pid) else 1


class Server:
    """A server process and its children, in a process session of their own. Use as a context manager."""

    process: subprocess.Popen[bytes] | _StartedElsewhere
    started: ClassVar[weakref.WeakSet[Server]] = weakref.WeakSet()  # a failed test's report shows their logs

    def __init__(
        self,
        model: Path,
        backend: str,
        *flags: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        module: str = "sglang.launch_server",
    ) -> None:
        """Prepare a server without starting it. ``prefix`` is a command that finally executes the server's command."""
        command = (*prefix, sys.executable, "-m", module, "--model-path", str(model))
        self._prepare([*command, "--attention-backend", backend, *_COMMON, *flags], log, environment or {})
        if DEVICE == "cpu":  # CUDA does not survive a fork
            self._environment |= forking.environment(self._environment)

    @classmethod
    def of_command(
        cls, program: str, *arguments: str, log: Path, environment: Mapping[str, str] | None = None
    ) -> Server:
        """Return a server, not started yet, that ``program`` of this Python environment starts."""
        server = cls.__new__(cls)
        server._prepare([str(Path(sys.executable).with_name(program)), *arguments], log, environment or {})
        return server

    def _prepare(self, command: list[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self._flags = command
        self.listen_at(free_port())
        self._environment = os.environ | {"HF_HUB_OFFLINE": "1"} | dict(environment)

    def listen_at(self, port: int) -> None:
        """Set the port. Call this before the start, for example to take the address of an earlier server."""
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*self._flags, "--port", str(port)]

    def start(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )
        Server.started.add(self)

    def join(self, port: int, pid: int) -> None:
        """Use a server that another process started, instead of starting one."""
        self.listen_at(port)
        self.process = _StartedElsewhere(pid)
        Server.started.add(self)

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_until_healthy()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if (status := self.process.poll()) is not None:
                raise RuntimeError(f"the server ended with status {status}:\n{self.log_tail()}")
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)  # another program starts: there is no event to wait for
        raise RuntimeError(f"the server was not healthy after {START_SECONDS} s:\n{self.log_tail()}")

    @property
    def own_process(self) -> subprocess.Popen[bytes]:
        """Return the server's process. Only the parent can wait for its end: assert that this process started it."""
        assert isinstance(self.process, subprocess.Popen), "another process started the server"
        return self.process

    def family(self) -> list[psutil.Process]:
        """Return the server's process and all its descendants."""
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.own_process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.own_process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.own_process.wait()

    def generate(
        self, ids: list[int], new_tokens: int = 16, seconds: float = ANSWER_SECONDS, **more: Any
    ) -> dict[str, Any]:
        """Return the answer of /generate to token ids: a greedy continuation and its logprobs.

        ``more`` are further fields of the request. ``seconds`` is the timeout.
        """
        body: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": True,
        } | more
        try:
            reply = requests.post(f"{self.url}/generate", json=body, timeout=seconds)
        except requests.Timeout as error:
            raise AssertionError(f"no answer after {seconds:.0f} s. Its processes:\n{self.stacks()}") from error
        assert reply.ok, f"{reply.status_code}: {reply.text}"  # the text gives the reason
        answer: dict[str, Any] = reply.json()
        return answer

    def stream(self, ids: list[int], new_tokens: int) -> Iterator[str]:
        """Yield the whole text so far after every token."""
        body: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "stream": True,
        }
        with requests.post(f"{self.url}/generate", json=body, stream=True, timeout=600) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    yield json.loads(line[len(b"data: ") :])["text"]

    def worker(self) -> psutil.Process | None:
        """Return the CPU worker's process, or None if there is none now."""
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if "cpu_worker" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        return None

    def wait_for_worker(self, other_than: int = 0, seconds: float = 60) -> psutil.Process:
        """Wait for a worker that serves and whose process id is not ``other_than``; return its process."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            worker = self.worker()
            if worker and worker.pid != other_than and f"CPU worker {worker.pid} serves" in self.log.read_text():
                return worker
            time.sleep(0.05)  # another program starts: there is no event to wait for
        raise AssertionError(f"no new worker after {seconds} s:\n{self.log_tail()}")

    def miss_rows(self) -> dict[str, float]:
        """Return the number of rows with misses, by what served them. Needs --enable-metrics."""
        text = requests.get(f"{self.url}/metrics", timeout=30).text
        found = re.findall(r'^sglang_hybrid_miss_rows_total\{by="([^"]+)"[^}]*\} (\S+)', text, re.MULTILINE)
        return {by: float(rows) for by, rows in found}

    def exported(self) -> set[str]:
        """Return the names of sglang-hybrid's time series at /metrics. Needs --enable-metrics."""
        text = requests.get(f"{self.url}/metrics", timeout=30).text
        return set(re.findall(r"^(sglang_hybrid_\w+)[{ ]", text, re.MULTILINE))

    def generate_together(self, prompts: list[list[int]], new_tokens: int = 16) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self.generate(ids, new_tokens), prompts))

    def flush_cache(self) -> None:
        """Flush the radix cache. Retry while SGLang refuses: it frees a request a moment after the request's answer."""
        self.wait_for(lambda: requests.post(f"{self.url}/flush_cache", timeout=60).ok, seconds=30)

    def info(self) -> dict[str, Any]:
        answer: dict[str, Any] = requests.get(f"{self.url}/server_info", timeout=30).json()
        return answer

    def wait_for_log(self, text: str, seconds: float = 60) -> None:
        self.wait_for(lambda: text in self.log.read_text(errors="replace"), seconds)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 240) -> None:
        """Poll ``condition`` until it is true: another program's state raises no event.

        The default is long because a shared core prefills some 50 tokens per second, and chunks have 2,048 tokens.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain:\n{self.log_tail()}"
            time.sleep(0.2)

    def state(self) -> str:
        """Return whether the server runs and the last lines of its log, for the report of a failed test."""
        status = self.process.poll()
        return f"{'runs' if status is None else f'ended with status {status}'}\n{self.log_tail(25)}"

    def stacks(self) -> str:
        """Return the Python stacks of all its processes, which show where a server that does not answer hangs."""
        spy = Path(sys.executable).with_name("py-spy")
        dumps = []
        for process in self.family():
            with contextlib.suppress(psutil.Error, OSError, subprocess.TimeoutExpired):
                used = f"{process.pid} {process.name()} ({process.status()}, {sum(process.cpu_times()[:2]):.0f} CPU s)"
                command = [str(spy), "dump", "--pid", str(process.pid)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
                dumps.append(f"{used}\n{done.stdout or done.stderr}")
        return "\n".join(dumps)

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def run_module(module: str, *arguments: str) -> str:
    """Run ``python -m module`` and return its output; fail with the end of the output if the program fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout
