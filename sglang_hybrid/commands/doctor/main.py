"""``sglang-hybrid doctor``: command line and printed report."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_hybrid.commands.doctor.report import Report, Status

if TYPE_CHECKING:
    from rich.console import Console

_DESCRIPTION = """\
Check and measure this machine, and say what to change: versions, settings and hooks; CPU kernels, cores, NUMA nodes,
memory, huge pages and limits of the container; driver, PCIe and CUDA kernels where there is a GPU. Nothing is changed.
Settings are those of the environment (SGLANG_HYBRID_CONFIG, SGLANG_HYBRID_SET)."""
SCHEMA = """\
what --json prints:
  {
    "versions": {NAME: VERSION or null, ...},       null: not installed
    "checks": [
      {
        "name": NAME,
        "status": "ok" | "advice" | "problem" | "skipped",
        "found": TEXT,
        "to_do": one sentence, null if ok
      }, ...
    ],
    "measurements": {NAME: NUMBER, ...}             memory_read_gb_s, pcie_copy_gb_s; only what was measured
  }

A problem keeps a server from starting, or from using the GPU. Advice makes a server faster or safer.

exit status: 0 without problems, 1 with a problem, 2 for a wrong command line

examples:
  sglang-hybrid doctor                              everything, in half a minute
  sglang-hybrid doctor --quick                      only what can be looked up, in a second or two
  sglang-hybrid doctor --json > report.json         for a program; a bug report has it too (report-problem)
"""
_STYLES = {Status.OK: "green", Status.ADVICE: "yellow", Status.PROBLEM: "bold red", Status.SKIPPED: "dim"}
_INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status: 1 if a check found a problem."""
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid doctor",
        description=_DESCRIPTION,
        epilog=SCHEMA,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="skip what takes seconds: the bandwidth of memory and of PCIe, and hooks, for which SGLang is imported",
    )
    options = parser.parse_args(arguments)
    try:
        # libraries that a check loads may print: standard output is for the report alone
        with contextlib.redirect_stdout(sys.stderr):
            report = _examine(quick=options.quick)
    except KeyboardInterrupt:
        return _INTERRUPTED
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print_report(report)
    return report.exit_status


def _examine(*, quick: bool) -> Report:
    from rich.console import Console

    from sglang_hybrid.commands.doctor.examine import examine
    from sglang_hybrid.commands.doctor.machine import Machine

    with Console(stderr=True).status("") as line:
        return examine(Machine(), quick=quick, tell=lambda name: line.update(f"checking {name}"))


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a table of all findings, then what to do, problems first."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(highlight=False)
    table = Table("check", "status", "found", box=None, pad_edge=False)
    for name, finding in report.findings.items():
        table.add_row(Text(name), Text(finding.status, style=_STYLES[finding.status]), Text(finding.found))
    console.print(table)
    for status, title in ((Status.PROBLEM, "Problems"), (Status.ADVICE, "Advice")):
        if report.count(status):
            console.print(f"\n{title}", style=_STYLES[status])
        for name, finding in report.findings.items():
            if finding.status is status:
                console.print(Text(f"  {name}: {finding.to_do}"), soft_wrap=True)
    counts = ", ".join(f"{report.count(status)} {status.value}" for status in Status)
    console.print(f"\n{counts}")
