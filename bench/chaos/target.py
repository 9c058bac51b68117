"""The server that faults are injected into: how it starts and ends, its processes, and what they hold."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import requests

from bench.chaos.switches import SAME_BITS, SPOIL_FREED_PAGES, TELL_STACKS, in_environment
from bench.free_port import free_port
from sglang_hybrid.origin import ROOT

START_SECONDS = 600.0  # on a GPU kernels may have to be compiled
# the server gets its own small file systems in place of directories that other programs could fill up
_OWN_FILE_SYSTEMS = """
mount -t tmpfs -o size=64m,nr_inodes=1k tmpfs /dev/shm &&
mount -t tmpfs -o size=256k,nr_inodes=64 tmpfs "$TMPDIR" &&
exec "$@"
"""
# SGLang checks its memory accounting at every step and when idle, and exits if it does not add up
_STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


class TargetError(RuntimeError):
    """The server ended or did not reach an expected state in time; the message has the end of its log."""


def may_mount() -> bool:
    probe = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm"]
    return os.geteuid() == 0 and subprocess.run(probe, capture_output=True).returncode == 0


class Target:
    """A server in processes of its own. Use as a context manager: healthy inside, ended afterwards."""

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        directory: Path,
        retract_steps: int,
        switches: Sequence[str] = (),
        same_bits: bool = True,
        has_worker: bool = True,
    ) -> None:
        """Prepare the command of the server; the context starts it.

        SGLang retracts requests when the pool has no pages for their next tokens, and every ``retract_steps`` steps,
        which must be more than a request takes alone. ``switches``: bugs on purpose, beside the switches of every chaos
        run. ``same_bits`` needs a CPU. ``has_worker``: whether the server's policy has a worker.
        """
        self.has_same_bits, self.has_worker = same_bits, has_worker
        self.model = model
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "server.log"
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-"))  # a short path: sockets are created there
        self.own_file_systems = same_bits and may_mount()  # not with a GPU: kernels are compiled there
        prefix = ("unshare", "--mount", "sh", "-c", _OWN_FILE_SYSTEMS, "sh") if self.own_file_systems else ()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *prefix, sys.executable, "-m", "bench.chaos.server", "--model-path", str(model),
            "--attention-backend", "hybrid", "--host", "127.0.0.1", "--port", str(self.port), *flags,
        ]  # fmt: skip
        self._environment = os.environ | _STRICT | {
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": str(retract_steps),
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self.temporary),
            **in_environment([*([SAME_BITS] if same_bits else []), SPOIL_FREED_PAGES, *switches]),
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Target:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.wait_for(self._is_healthy, "to become healthy", START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _is_healthy(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_for_worker(self, seconds: float = 60.0) -> None:
        """Wait until a worker serves. Return at once if the policy has no worker."""
        if self.has_worker:
            self.wait_for(lambda: self.serving_worker() is not None, "to have a worker", seconds)

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if not self.is_alive:
                raise TargetError(f"the server ended while it was waited for {what}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise TargetError(f"waited {seconds:.0f} s for the server {what}:\n{self.log_tail()}")
            time.sleep(0.1)

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    # -- processes ---------------------------------------------------------------------------

    def family(self) -> list[psutil.Process]:
        assert self._process
        with contextlib.suppress(psutil.Error):
            main = psutil.Process(self._process.pid)
            return [main, *main.children(recursive=True)]
        return []

    def workers(self) -> list[psutil.Process]:
        """Return the CPU workers that serve or start."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if "cpu_worker" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def serving_worker(self) -> psutil.Process | None:
        log = self.log.read_text(errors="replace")
        return next((worker for worker in self.workers() if f"CPU worker {worker.pid} serves" in log), None)

    def scheduler(self) -> psutil.Process:
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if "scheduler" in process.name() or any("sglang::scheduler" in part for part in process.cmdline()[:1]):
                    return process
        raise TargetError(f"there is no scheduler process:\n{self.log_tail()}")

    # -- what it holds -----------------------------------------------------------------------

    def holdings(self) -> dict[str, int]:
        """Count what could be leaked: resources of the scheduler process, and files in the server's directories."""
        process = self.scheduler()
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        root = Path(f"/proc/{process.pid}/root")
        # SGLang's pool of threads for grammars grows now and then
        pooled = self.stacks().count("concurrent/futures/thread.py")
        return {
            "threads": process.num_threads() - pooled,
            "descriptors": process.num_fds(),
            "mailboxes": len(re.findall("memfd:sglang-hybrid-mailbox", maps)),
            "pools": len(re.findall("memfd:sglang-hybrid-kv", maps)),
            "processes": len(process.children(recursive=True)),
            "files": sum(1 for _ in (root / self.temporary.relative_to("/")).rglob("*")),
            "shared-memory files": sum(1 for _ in (root / "dev/shm").iterdir()),
        }

    def stacks(self) -> str:
        """Return the stacks of the scheduler process's threads, which show what a leaked thread is for."""
        before = self.log.stat().st_size
        self.scheduler().send_signal(TELL_STACKS)
        time.sleep(1)
        with self.log.open("rb") as log:
            log.seek(before)
            return log.read().decode(errors="replace")

    def load(self) -> dict[str, Any]:
        found: dict[str, Any] = requests.get(f"{self.url}/v1/loads", timeout=30).json()["loads"][0]
        return found

    def wait_until_idle(self, seconds: float = 120.0) -> None:
        self.wait_for(lambda: self.load()["num_running_reqs"] == 0, "to be idle", seconds)

    def flush(self) -> bool:
        return requests.post(f"{self.url}/flush_cache", timeout=60).ok

    def miss_rows(self) -> dict[str, int]:
        """Return the number of rows whose misses were served, by who served them."""
        text = requests.get(f"{self.url}/metrics", timeout=30).text
        found = re.findall(r'^sglang_hybrid_miss_rows_total\{by="([^"]+)"[^}]*\} (\S+)', text, re.MULTILINE)
        return {by: int(float(rows)) for by, rows in found}
