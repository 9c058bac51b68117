"""Run a command in a pseudo-terminal of its own, as a user would."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Self

import psutil

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Signals of the keyboard. A background job of a shell, such as a test run, ignores them, and its children inherit that.
_DEFAULT = (signal.SIGINT, signal.SIGQUIT)


class Terminal:
    """A command in a pseudo-terminal, started at once. Use as a context manager: its end kills the process tree."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=screen, stdout=screen, stderr=screen, env=os.environ | dict(environment),
            start_new_session=True, preexec_fn=lambda: _take_terminal(screen),
        )  # fmt: skip
        os.close(screen)
        self._shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        self._reader.join(5)
        os.close(self._keyboard)

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        return []

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the command's side is closed
            while data := os.read(self._keyboard, 4096):
                self._shown += data

    def lines(self) -> list[str]:
        """Return the lines as a user sees them: of a line that was overwritten, only the last version."""
        text = self._shown.decode(errors="replace").replace("\r\n", "\n")
        lines = [_CONTROL.sub("", line.rsplit("\r", 1)[-1]) for line in text.split("\n")]
        return [line for line in lines if line.strip()]

    def wait_for(self, text: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not any(text in line for line in self.lines()):
            assert self.process.poll() is None, "\n".join(self.lines())
            assert time.monotonic() < deadline, "\n".join(self.lines())
            time.sleep(0.2)  # another program prints: there is no event to wait for

    def saw(self, text: str) -> bool:
        """Return True if ``text`` was printed at any time, even in a line that was overwritten later."""
        return text in self._shown.decode(errors="replace")

    def type(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)


def _take_terminal(screen: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(screen, termios.TIOCSCTTY, 0)
    for number in _DEFAULT:
        signal.signal(number, signal.SIG_DFL)
