"""Processes that live and end together: started, watched, ended with everything below them."""

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
    """A child process that can be asked to end, and is killed with its whole session if it does not."""

    def ask_to_end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def end(self, deadline: float) -> None:
        """Wait until ``deadline`` (of time.monotonic), then kill what is left of it and of what it started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def end_all(members: Sequence[ServerProcess]) -> None:
    """The last one started first, so that nobody is sent what nobody can serve."""
    for member in reversed(members):
        member.ask_to_end()
    deadline = time.monotonic() + _STOP_SECONDS
    for member in reversed(members):
        member.end(deadline)


def wait_until(members: Sequence[ChildProcess], ready: Callable[[], bool], seconds: float, what: str) -> None:
    """Raises Ended when one of ``members`` is gone, TimeoutError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not ready():
        for member in members:
            member.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} after {seconds:.0f} s; logs: {', '.join(str(one.log) for one in members)}")
        time.sleep(0.5)  # no event to wait for: other programs start


def get(url: str) -> bytes | None:
    """What is there, if it is there and says that all is well."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return bytes(reply.read()) if reply.status == 200 else None
    except (urllib.error.URLError, OSError):
        return None


def answers(url: str) -> bool:
    return get(url) is not None
