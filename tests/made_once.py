"""What several test files use and is made once, also where two processes run the tests: servers, answers.

Who wants a thing first makes it and notes it in the folder that ``SGLANG_HYBRID_TEST_SHARED`` names; others wait for it
and read the note. The process that began the test run removes the folder and ends the servers (``conftest.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

FOLDER = "SGLANG_HYBRID_TEST_SHARED"


class Server(Protocol):
    port: int
    process: Any

    def start(self) -> None: ...
    def wait_until_healthy(self) -> None: ...
    def join(self, port: int, pid: int) -> None: ...


AnyServer = TypeVar("AnyServer", bound=Server)


def running(
    name: str, make: Callable[[Path], AnyServer], begin: Callable[[AnyServer], None] | None = None
) -> AnyServer:
    """The server of this name. ``make`` makes one that is not started yet, whose log is at the given path.

    ``begin``: asks it something first. One that fails to answer is ended, and another takes its place: once, and told.
    """
    note = _folder() / f"{name}.server"
    with _locked(name):
        if note.exists():
            server = make(_folder() / f"{name}.log")
            server.join(**json.loads(note.read_text()))
            return server
        server = _started(make, _folder() / f"{name}.log", note)
        if begin:
            try:
                begin(server)
            except AssertionError as error:
                print(f"server {name} is started again: {error}", file=sys.__stderr__, flush=True)
                os.killpg(server.process.pid, signal.SIGKILL)
                server = _started(make, _folder() / f"{name}.log", note)
                begin(server)
        return server


def _started(make: Callable[[Path], AnyServer], log: Path, note: Path) -> AnyServer:
    server = make(log)
    server.start()
    # before it is healthy, so that one that never will be is ended too
    note.write_text(json.dumps({"port": server.port, "pid": server.process.pid}))
    server.wait_until_healthy()
    return server


def answered(name: str, ask: Callable[[], Any]) -> Any:
    """What ``ask`` returns, as JSON keeps it. Who asks for it after a failure fails too, without waiting again."""
    note, failure = _folder() / f"{name}.json", _folder() / f"{name}.failed"
    with _locked(name):
        assert not failure.exists(), f"another test failed to ask: {failure.read_text()}"
        if not note.exists():
            try:
                note.write_text(json.dumps(ask()))
            except Exception as error:
                failure.write_text(repr(error)[:1000])
                raise
        return json.loads(note.read_text())


def end_servers(folder: Path) -> None:
    for note in folder.glob("*.server"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(json.loads(note.read_text())["pid"], signal.SIGKILL)


def _folder() -> Path:
    return Path(os.environ[FOLDER])


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    with (_folder() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
