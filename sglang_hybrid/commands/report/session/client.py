"""The report's side of a session process: start the process, request measurements, receive progress, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_hybrid.commands.report.session.load import Load
from sglang_hybrid.commands.report.session.messages import Channel, Message
from sglang_hybrid.origin import ROOT

_END_SECONDS = 10
_TAIL_LINES = 12

Progress = Callable[[str, float], None]


class MeasurementError(RuntimeError):
    """A measurement failed, or its process is gone. The message is shown on the report's page."""


class SessionProcess:
    """A child process with one loaded model. A killed parent ends the child too, because the socket closes."""

    def __init__(self, load: Load, log: Path, progress: Progress) -> None:
        """Start the process and wait for the model. Raise MeasurementError if the model cannot be loaded."""
        self.load, self._log = load, log
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang_hybrid.commands.report.session.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        self._channel = Channel(ours)
        progress("loading the model", 0.0)
        try:
            self._channel.send({"load": load.as_json()})
            self.facts: dict[str, Any] = self._answer(progress)
        except BaseException:
            self.close()
            raise

    def ask(self, operation: str, progress: Progress, **arguments: Any) -> Any:
        """Return the result of measurement ``operation``. Raise MeasurementError if it fails or the process is gone."""
        try:
            self._channel.send({"operation": operation, "arguments": arguments})
        except OSError as error:
            raise MeasurementError(self._obituary()) from error
        return self._answer(progress)

    def _answer(self, progress: Progress) -> Any:
        while (message := self._channel.receive()) is not None:
            if (result := _result_of(message, progress)) is not None:
                return result
        raise MeasurementError(self._obituary())

    def _obituary(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        tail = self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return f"the process of the model ended with status {self._process.returncode}. Its last words:\n" + "\n".join(
            tail
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Kill the process and all processes in its group."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the process has nothing to save
        self._process.wait()


def _result_of(message: Message, progress: Progress) -> Any | None:
    """Return the result in ``message``, or None for a progress message. Raise MeasurementError for an error."""
    if "progress" in message:
        progress(message["progress"], message["part"])
        return None
    if "error" in message:
        raise MeasurementError(message["error"])
    return message["result"]
