"""A child process in a session of its own, with all output in a log file."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 1 << 16


class Ended(RuntimeError):
    """A child process that should still run has ended. The message holds the end of its log."""


class ChildProcess:
    """One child process in a session of its own, so that Ctrl-C reaches the launcher and not the child."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def check(self) -> None:
        """Raise Ended if the process has ended."""
        if (status := self.process.poll()) is not None:
            tail = "\n".join(self.log_lines()[-25:])
            raise Ended(f"{self.name} ended with status {status}. The end of {self.log}:\n{tail}")

    def log_lines(self) -> list[str]:
        """Return the lines in the last 64 KiB of the log."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()


def _end_with_parent() -> None:
    # The guard kills the children of a killed launcher. This signal is for the case that the guard was killed too.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
