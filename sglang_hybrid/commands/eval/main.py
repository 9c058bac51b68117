"""``sglang-hybrid eval``: measure the accuracy of settings against full attention on the same prompts."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from sglang_hybrid.commands.eval.arguments import parse
from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.model import DefaultModelError
from sglang_hybrid.config import ConfigError


def main(argv: Sequence[str]) -> int:
    command = shlex.join(["sglang-hybrid", "eval", *argv])
    try:
        return _evaluate(parse(argv), command)
    except (InputError, ConfigError, DefaultModelError) as error:
        print(f"sglang-hybrid eval: {error}", file=sys.stderr)
        return 2


def _evaluate(options: argparse.Namespace, command: str) -> int:
    if options.ruler_make is not None:
        from sglang_hybrid.commands.eval.asked_prompts import write_ruler_prompts

        return write_ruler_prompts(options)
    if options.url:
        from sglang_hybrid.commands.eval.servers.evaluate import evaluate_servers

        return evaluate_servers(options, command)
    from sglang_hybrid.commands.eval.in_process import evaluate_in_process

    return evaluate_in_process(options, command)
