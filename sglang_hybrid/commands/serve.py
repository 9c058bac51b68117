"""``sglang-hybrid serve``: check the flags, run the server in a child process, and print few lines about it."""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid import __version__, events
from sglang_hybrid.commands import arguments, preflight
from sglang_hybrid.commands.arguments import Refused, ServerArguments, given
from sglang_hybrid.commands.child_process import ChildProcess
from sglang_hybrid.commands.console import Console, Facts, Progress, announce, complain, last_words
from sglang_hybrid.commands.defaults import with_defaults
from sglang_hybrid.commands.foreground import own_foreground_group
from sglang_hybrid.commands.interrupts import Interrupted, Interrupts
from sglang_hybrid.commands.ports import check_port
from sglang_hybrid.commands.run import Run
from sglang_hybrid.config import HybridConfig

REFUSED, FAILED = 2, 1  # exit statuses
_SERVER = [sys.executable, "-m", "sglang_hybrid.server"]
_LOOK_SECONDS = 0.25  # between two reads of the server's log with --verbose
_NOTE_SECONDS = 2.0  # between two records of the files in shared memory while the server starts


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 after Ctrl-C or SIGTERM, 2 for flags that are refused, 1 for a server that failed."""
    if given(argv, "-h", "--help"):
        print(f"{_parser().format_help()}\nflags of SGLang, all of which can be given as well:\n", flush=True)
        os.execv(sys.executable, [*_SERVER, "--help"])
    interrupts = Interrupts()
    try:
        options, flags = _parser().parse_known_args(argv)
        flags = with_defaults(flags)
        asked = arguments.read(flags)
        config = preflight.check(asked)
        _check_log_file(options.log_file)
    except Interrupted:
        print("\nsglang-hybrid: ended before the server was started")
        return 0
    except Refused as error:
        complain(str(error))
        return REFUSED
    interrupts.watch()
    return _serve(flags, asked, config, options, interrupts)


def _check_log_file(path: Path | None) -> None:
    try:
        if path is not None:
            path.open("ab").close()
    except OSError as error:
        raise Refused(f"--log-file {path}: {error.strerror}") from error


def _serve(
    flags: Sequence[str],
    asked: ServerArguments,
    config: HybridConfig | None,
    options: argparse.Namespace,
    interrupts: Interrupts,
) -> int:
    console = Console()
    run = Run()
    with own_foreground_group(), run:
        child = run.start("server", [*_SERVER, *flags], log=options.log_file)
        name = asked.served_model_name or asked.model_path
        console.say(f"sglang-hybrid {__version__} starts a server of {name}")
        kept = "" if options.log_file else " (removed at the end; --log-file FILE keeps it, --verbose shows it)"
        console.say(f"  log      {child.log}{kept}")
        watch = _Watch(run, child, console, config, options.verbose)
        if watch.until_end(interrupts):
            console.say_goodbye("sglang-hybrid: ending the server")
            return 0
        return watch.explain_end(asked)


class _Watch:
    """The launcher's loop: shows the server's events until the server ends or a signal asks the launcher to end."""

    def __init__(self, run: Run, child: ChildProcess, console: Console, config: HybridConfig | None, verbose: bool):
        self._run, self._child, self._console = run, child, console
        self._facts, self._progress = Facts(config), Progress(console)
        self._refused: str | None = None
        self._is_ready = False
        self._calibrated: float | None = None  # part that is done, 0 to 1; None: no calibration runs
        self._log = child.log.open(errors="replace") if verbose else None
        self._began = time.monotonic()
        self._noted = 0.0

    def until_end(self, interrupts: Interrupts) -> bool:
        """Wait for the end. Return True if a signal asked for it, False if the server ended by itself."""
        ended = os.pidfd_open(self._child.process.pid)
        try:
            while True:
                select.select([self._run.events.fileno(), interrupts.fileno(), ended], [], [], self._patience())
                self._look()
                if interrupts.came:
                    return True
                if self._child.process.poll() is not None:
                    self._look()
                    return False
        finally:
            os.close(ended)

    def _patience(self) -> float | None:
        """Return the longest wait for an event in seconds. None: no limit, so that an idle server costs nothing."""
        if self._log is not None:
            return _LOOK_SECONDS
        return None if self._is_ready else 1.0

    def _look(self) -> None:
        if self._log is not None and (text := self._log.read()):
            self._console.write(text)
        for event in self._run.events.read():
            self._show(event)
        now = time.monotonic()
        if not self._is_ready:
            what = "loading" if self._calibrated in (None, 1.0) else f"calibrating {100 * self._calibrated:.0f} %"
            self._console.status(f"{what}, {now - self._began:.0f} s")
            if now - self._noted >= _NOTE_SECONDS:
                self._noted = now
                self._run.note_shared_memory()

    def _show(self, event: events.AnyEvent) -> None:
        match event:
            case events.Refused(sentence=sentence):
                self._refused = self._refused or sentence
            case events.Ready(url=url, model=model):
                self._run.note_shared_memory()
                self._is_ready = True
                for line in self._facts.lines():
                    self._console.say(line)
                announce(self._console, url, model)
            case events.Calibrating(part=part):
                if part == 0.0:
                    self._console.say("  calibrating predictions, once for this model")
                self._calibrated = part
            case _ if not self._is_ready:  # before Ready, SGLang's warm-up request sends events too
                self._facts.take(event)
            case _:
                self._progress.show(event)

    def explain_end(self, asked: ServerArguments) -> int:
        """Print why the server ended; the last line is the server's own message. Return the exit status."""
        self._console.status("")
        if self._refused is not None:
            complain(self._refused)
            return REFUSED
        status = self._child.process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        try:
            check_port(asked.host, asked.port)
            why = last_words(self._child.log_lines())
        except Refused as busy:
            why = str(busy)
        complain(f"the server {how}; --log-file FILE keeps its whole log, --verbose shows it. It said last:\n{why}")
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid serve",
        allow_abbrev=False,  # unknown flags are SGLang's
        add_help=False,
        description="An OpenAI-compatible server of SGLang with the KV cache in host memory, of the default model "
        "unless --model-path names another: a directory, or a name that sglang-hybrid model --help lists.",
    )
    parser.add_argument("--verbose", action="store_true", help="show the server's whole log")
    parser.add_argument("--log-file", type=Path, metavar="FILE", help="keep the server's log in FILE")
    return parser
