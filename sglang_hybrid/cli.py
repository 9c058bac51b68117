"""The program ``sglang-hybrid`` and the table of its commands.

A command's module is imported when the command runs, so that ``--help`` answers at once. Each command parses the
arguments after its name itself: SGLang's flags, or its own.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hybrid import __version__


@dataclass(frozen=True)
class Command:
    module: str  # module whose main(arguments) runs the command and returns an exit status, or None for success
    summary: str

    def run(self, arguments: Sequence[str]) -> None:
        status = importlib.import_module(self.module).main(list(arguments))
        if status is not None:
            sys.exit(status)


COMMANDS = {
    "serve": Command("sglang_hybrid.commands.serve", "start an OpenAI-compatible server; takes every SGLang flag"),
    "pd": Command("sglang_hybrid.commands.pd.main", "start prefill, decode and router on this machine"),
    "worker": Command("cpu_worker.main", "start a CPU worker by hand; servers start their own"),
    "profile": Command("sglang_hybrid.commands.profile.main", "tune prediction, selection and recall for a model"),
    "eval": Command("sglang_hybrid.commands.eval.main", "accuracy of settings against full attention"),
    "report": Command("sglang_hybrid.commands.report.main", "the papers' experiments on this machine, as one page"),
    "bench": Command("sglang_hybrid.commands.bench", "run SGLang's benchmarks with this backend"),
    "chaos": Command("sglang_hybrid.commands.checkout", "faults at random against a real server, in a checkout"),
    "config": Command("sglang_hybrid.commands.config", "every setting: its value, what auto becomes here, its source"),
    "size": Command("sglang_hybrid.commands.size.main", "how many requests fit on a machine, how fast they decode"),
    "model": Command(
        "sglang_hybrid.commands.model.__main__",
        "prepare a known model, the default one or another, and print its directory",
    ),
    "top": Command("sglang_hybrid.commands.top.main", "watch a running server, in the terminal or in a browser"),
    "check": Command("sglang_hybrid.commands.check", "verify that this SGLang takes all our hooks"),
    "doctor": Command("sglang_hybrid.commands.doctor.main", "check and measure this machine, and say what to change"),
    "report-problem": Command(
        "sglang_hybrid.commands.report_problem.main", "collect what a bug report needs, without secrets, in one file"
    ),
}

_FLAGS = {"-h, --help": "show this; COMMAND --help tells more", "--version": "show the version"}
_EXAMPLES = """\
examples:
  sglang-hybrid serve                                              the default model at port 30000
  sglang-hybrid serve --model-path MODEL --hybrid budget_tokens=4096
  sglang-hybrid config --hybrid budget_tokens=4096                 what these settings mean on this host
  sglang-hybrid doctor                                             what to change on this machine
  sglang-hybrid top                                                what a server with --enable-metrics does now
"""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else None
    if name in COMMANDS:
        COMMANDS[name].run(arguments[1:])
    elif name in ("-h", "--help", "help"):
        print(help_text())
    elif name == "--version":
        print(__version__)
    else:
        print(f"{help_text()}\n{_complaint(name)}", file=sys.stderr)
        sys.exit(2)


def help_text() -> str:
    def rows(entries: dict[str, str]) -> str:
        return "\n".join(f"  {name:16}{text}" for name, text in entries.items())

    commands = rows({name: command.summary for name, command in COMMANDS.items()})
    return (
        "usage: sglang-hybrid COMMAND ...\n\nKV cache in host memory for SGLang.\n\n"
        f"commands:\n{commands}\n\nflags:\n{rows(_FLAGS)}\n\n{_EXAMPLES}"
    )


def _complaint(name: str | None) -> str:
    if name is None:
        return "sglang-hybrid: name a command"
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"sglang-hybrid: there is no command {name!r}" + (f", did you mean {near[0]}?" if near else "")


if __name__ == "__main__":
    main()
