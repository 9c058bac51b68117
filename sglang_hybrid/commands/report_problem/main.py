"""``sglang-hybrid report-problem``: command line and printed output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid.config_flags import add_config_flags

_DESCRIPTION = """\
Collect what a bug report needs into one archive: versions, the output of doctor, settings, the state of compiled
kernels, and the end of a log. Needs no GPU, and changes and sends nothing.

Keys, tokens, passwords, e-mail addresses, and the names of user, home directory and host are removed, as far as they
can be told. Prompts in a log (--log-requests) stay in it: look through the archive before you send it."""
_EXAMPLES = """\
examples:
  sglang-hybrid serve --log-file server.log ...               until the problem is there
  sglang-hybrid report-problem --log server.log               in half a minute
  sglang-hybrid report-problem --quick --hybrid policy=full   without measurements, with a setting of the server
"""
_INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status: 1 if the archive cannot be written."""
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid report-problem",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="a log of the server, as serve --log-file keeps it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: sglang-hybrid-report-DATE-TIME.tar.gz here")
    parser.add_argument("--quick", action="store_true", help="skip what takes seconds, as doctor --quick does")
    add_config_flags(parser)
    options = parser.parse_args(arguments)
    if options.log is not None and not options.log.is_file():
        parser.error(f"--log {options.log}: there is no such file")
    if options.out is not None and (options.out.exists() or not options.out.absolute().parent.is_dir()):
        found = "there is a file already" if options.out.exists() else "there is no such directory"
        parser.error(f"--out {options.out}: {found}")  # checked now, because collecting takes half a minute
    given = [*(("--hybrid-config", str(options.hybrid_config)) if options.hybrid_config else ())]
    given += [part for setting in options.hybrid for part in ("--hybrid", setting)]
    try:
        return _report(options.log, options.out, options.quick, given)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _report(log: Path | None, out: Path | None, quick: bool, settings: Sequence[str]) -> int:
    from rich.console import Console

    from sglang_hybrid.commands.report_problem import archive, collect
    from sglang_hybrid.commands.report_problem.redact import Redactor

    wanted = collect.Wanted(log, quick, settings)
    with Console(stderr=True).status("") as line:
        found = list(collect.parts(wanted, Redactor.of_this_machine(), lambda part: line.update(f"collecting {part}")))
    path = out or archive.default_name()
    try:
        archive.write(path, found)
    except OSError as error:
        print(f"sglang-hybrid report-problem: {path}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{path} has:")
    for part in found:
        print(f"  {part.name:18}{len(part.text.encode()):9,} bytes  {part.what}")
    print("Secrets and names were removed as far as they can be told. Look through it before you send it:")
    print(f"  tar -xzf {path}")
    return 0
