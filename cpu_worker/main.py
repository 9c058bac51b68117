"""``sglang-hybrid worker`` and ``python -m cpu_worker``: start the worker process."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cpu_worker import logs
from cpu_worker.control import ControlServer
from cpu_worker.parent import Parent, set_process_name
from cpu_worker.wakes import Wakes
from sglang_hybrid.ops.cpu.library import NativeError, library
from sglang_hybrid.protocol.directory import DirectoryError, WorkerDirectory

log = logging.getLogger(__name__)

_DESCRIPTION = """\
The CPU worker of sglang-hybrid: a process that computes attention over KV blocks in host memory for a server.

A server starts its own worker; nothing has to be done by hand. Start one by hand to run it under other limits or in
another Python environment, and give its directory to the server:

    sglang-hybrid worker --dir /run/user/1000/my-worker
    sglang-hybrid serve --hybrid worker=/run/user/1000/my-worker ...

Such a worker serves one server at a time and waits for the next one when that ends. Server and worker must run on one
machine and as the same user. SIGTERM or Ctrl-C ends it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker and return its exit status: 0 if told to end or if its server is gone, 1 if it cannot serve."""
    options = _parser().parse_args(argv)
    logs.set_up(options.log_level)
    set_process_name("hybrid-worker")
    with contextlib.ExitStack() as stack:
        wakes = stack.enter_context(Wakes())  # first: a signal during startup must not skip cleanup
        parent = None
        if options.parent is not None:
            parent = stack.enter_context(contextlib.closing(Parent(options.parent)))
        try:
            library()
            place = stack.enter_context(_directory(options.dir, ours=parent is not None))
            if parent is not None and parent.is_gone():
                log.info("ending: process %d is gone", parent.pid)
                return 0
            server = stack.enter_context(ControlServer(place, parent, wakes))
        except (DirectoryError, NativeError) as error:
            log.error("cannot start: %s", error)
            return 1
        if parent is None:
            print(f"waiting for a server; start it with: --hybrid worker={place.path}", flush=True)
        return server.run()


@contextlib.contextmanager
def _directory(given: Path | None, ours: bool) -> Iterator[WorkerDirectory]:
    """Yield the worker's directory, and remove the directory at the end if this call created it or ``ours`` is True.

    ``given``: the directory, created if it does not exist; None: create one in XDG_RUNTIME_DIR or /tmp.
    ``ours``: the server created the directory for this worker alone; the server may be gone when the worker ends.
    Raise DirectoryError if the directory cannot be used or created.
    """
    made = given is None or not given.exists()
    try:
        if given is None:
            given = Path(tempfile.mkdtemp(prefix="sglang-hybrid-", dir=os.environ.get("XDG_RUNTIME_DIR") or "/tmp"))
        elif made:
            WorkerDirectory.at(given)  # check the path before creating anything
            given.mkdir(mode=0o700)
    except OSError as error:
        raise DirectoryError(f"directory {given or ''} cannot be made: {error.strerror}") from error
    try:
        yield WorkerDirectory.at(given)
    finally:
        if made or ours:
            with contextlib.suppress(OSError):  # another process put something there, or removed it
                given.rmdir()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid worker", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="directory in which server and worker meet, of mode 700; made if it does not exist "
        "(default: a new one, in XDG_RUNTIME_DIR or /tmp)",
    )
    parser.add_argument(
        "--parent",
        type=process_id,
        metavar="PID",
        help="end when this process ends, or when it lets go of the worker; a server gives its own",
    )
    parser.add_argument("--log-level", choices=logs.LEVELS, default="info", help="default: %(default)s")
    return parser


def process_id(text: str) -> int:
    pid = int(text)
    if not 0 < pid < 1 << 31:
        raise ValueError(text)
    return pid


if __name__ == "__main__":
    sys.exit(main())
