"""Processes that run together: wait until they are ready, and end them with the processes that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

from sglang_hybrid.commands.child_process import ChildProcess

_STOP_SECONDS = 6  # SGLang's disaggregated instances wait 20 s for schedulers that do not end by themselves


class ServerProcess(ChildProcess):
    """A child process that is asked to end by SIGTERM, and is killed with its process group if it does not."""

    def ask_to_end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def end(self, deadline: float) -> None:
        """Wait for the process until ``deadline`` (of time.monotonic), then kill the rest of its process group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def end_all(members: Sequence[ServerProcess]) -> None:
    """End all processes, the last one started first, so that no process sends requests to one that has ended."""
    for member in reversed(members):
        member.ask_to_end()
    deadline = time.monotonic() + _STOP_SECONDS
    for member in reversed(members):
        member.end(deadline)


def wait_until(members: Sequence[ChildProcess], ready: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until ``ready()``. Raise Ended if one of ``members`` has ended, TimeoutError after ``seconds``.

    ``what``: beginning of the TimeoutError's message.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        for member in members:
            member.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} after {seconds:.0f} s; logs: {', '.join(str(one.log) for one in members)}")
        time.sleep(0.5)  # other programs start, and there is no event to wait for


def get(url: str) -> bytes | None:
    """Return the body at ``url``, or None if there is no reply within 10 s or its status is not 200."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return bytes(reply.read()) if reply.status == 200 else None
    except (urllib.error.URLError, OSError):
        return None


def answers(url: str) -> bool:
    return get(url) is not None
