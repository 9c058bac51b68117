"""``sglang-hybrid eval``: measure the accuracy of settings against full attention on the same prompts."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from sglang_hybrid.commands.eval.arguments import parse
from sglang_hybrid.commands.eval.errors import INTERRUPTED, InputError
from sglang_hybrid.commands.model import DefaultModelError
from sglang_hybrid.config import ConfigError


def main(argv: Sequence[str]) -> int:
    command = shlex.join(["sglang-hybrid", "eval", *argv])
    try:
        with _interrupted_by_sigterm():
            return _evaluate(parse(argv), command)
    except (InputError, ConfigError, DefaultModelError) as error:
        print(f"sglang-hybrid eval: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sglang-hybrid eval: interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C: what has been measured is written, for example when ``timeout`` ends the program."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _evaluate(options: argparse.Namespace, command: str) -> int:
    if options.ruler_make is not None:
        from sglang_hybrid.commands.eval.asked_prompts import write_ruler_prompts

        return write_ruler_prompts(options)
    if options.url:
        from sglang_hybrid.commands.eval.servers.evaluate import evaluate_servers

        return evaluate_servers(options, command)
    from sglang_hybrid.commands.eval.in_process import evaluate_in_process

    return evaluate_in_process(options, command)
