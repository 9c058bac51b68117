"""``sglang-hybrid report``: command line, and the two files that the command writes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.model import DefaultModelError
from sglang_hybrid.commands.report.sizes import SIZES, Size

if TYPE_CHECKING:
    from sglang_hybrid.commands.report.context import Context, StartSession
    from sglang_hybrid.commands.report.experiments.base import Experiment

PAGE, MARKDOWN = "report.html", "report.md"
_INTERRUPTED = 130
_DESCRIPTION = """\
Run the experiments of the papers ScoutAttention, HGCA and HCAttention at the size that this machine allows, and write
one HTML page and a Markdown file with figures: the papers' numbers beside ours. Results are kept in the folder, so that
an interrupted report goes on where it stopped."""
_READING = (
    "Filled marks are ours; hatched, dashed or open ones are the papers', which have larger models and GPUs: compare "
    "shapes, not heights."
)
_EPILOG = """\
examples:
  sglang-hybrid report                                  everything, by the size of this machine, into report/
  sglang-hybrid report --size tiny --only policies,scout-ratio
  sglang-hybrid report --list                           experiments, and the numbers of each size
  sglang-hybrid report --size small --set prompt_tokens=6000 --set budgets=512,2048
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit status: 1 if an experiment failed, 2 for a wrong command line."""
    options = parse(arguments)
    try:
        if options.list:
            print(listing())
            return 0
        return write_report(options)
    except (InputError, DefaultModelError) as error:
        print(f"sglang-hybrid report: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on from the results in {options.out}", file=sys.stderr)
        return _INTERRUPTED


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid report", description=_DESCRIPTION, epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--size", choices=("auto", *SIZES), default="auto", help="auto goes by GPU, cores and memory (default)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="another number of the size, see --list"
    )
    parser.add_argument("--only", metavar="NAME,...", help="these experiments")
    parser.add_argument("--list", action="store_true", help="print experiments and sizes")
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder of the report (default: report)")
    parser.add_argument(
        "--model", type=Path, metavar="MODEL",
        help="directory of a Hugging Face model, or a name that sglang-hybrid model --help lists (default: the default "
        "model)",
    )  # fmt: skip
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument(
        "--codebook", type=Path, action="append", default=[], metavar="FILE", help="of policy hcattention"
    )
    parser.add_argument(
        "--threads", type=int, help="of torch on a CPU (default: as many as cores); 1 where others compute too"
    )
    parser.add_argument("--fresh", action="store_true", help="measure anew what earlier reports have measured")
    return parser.parse_args(arguments)


def listing() -> str:
    from sglang_hybrid.commands.report.experiments import EXPERIMENTS
    from sglang_hybrid.commands.report.machine import size_of_this_machine

    lines = ["experiments:"]
    lines += [f"  {one.name:18} {one.paper:15} {one.title}" for one in EXPERIMENTS]
    lines += [
        "",
        f"sizes (auto is {size_of_this_machine()} on this machine):",
        f"  {'':16}" + "".join(f"{name:32}" for name in SIZES),
    ]
    for field in dataclasses.fields(Size):
        values = [getattr(size, field.name) for size in SIZES.values()]
        lines.append(f"  {field.name:16}" + "".join(f"{_short(value):32}" for value in values))
    return "\n".join(lines)


def _short(value: object) -> str:
    return (
        ",".join(f"{one:.3g}" if isinstance(one, float) else str(one) for one in value)
        if isinstance(value, tuple)
        else str(value)
    )


def chosen(only: str | None) -> list[Experiment]:
    """Return the experiments that ``only`` names, or all for None. Raise InputError for an unknown name."""
    from sglang_hybrid.commands.report.experiments import EXPERIMENTS

    if only is None:
        return list(EXPERIMENTS)
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {one.name for one in EXPERIMENTS}
    if not names or (unknown := [name for name in names if name not in known]):
        wrong = ", ".join(unknown) if names else "nothing"
        raise InputError(f"--only {wrong}: the experiments are {', '.join(one.name for one in EXPERIMENTS)}")
    return [one for one in EXPERIMENTS if one.name in names]


def write_report(options: argparse.Namespace, start: StartSession | None = None) -> int:
    """Run the chosen experiments, write the HTML page and the Markdown file, and return the exit status.

    ``start`` replaces the process that holds the model, for tests. Raises InputError for wrong options.
    """
    from rich.console import Console

    from sglang_hybrid.commands.report.console import ReportProgress
    from sglang_hybrid.commands.report.running import run_all

    experiments, console = chosen(options.only), Console(stderr=True)
    if options.threads is not None:
        if options.threads < 1:
            raise InputError(f"--threads {options.threads}: at least 1 is needed")
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    context, size_name = _context(options, console, start)
    with ReportProgress(console, len(experiments)) as watcher:
        sections = run_all(experiments, context, watcher, _command(options, size_name))
    _write(options.out, context, size_name, sections)
    print(options.out / PAGE)
    print(options.out / MARKDOWN)
    failed = [one.name for one in sections if one.status == "failed"]
    if failed:
        print(
            f"sglang-hybrid report: {', '.join(failed)} failed; the page says why. The same command tries again",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _context(options: argparse.Namespace, console: object, start: StartSession | None) -> tuple[Context, str]:
    from rich.console import Console

    from sglang_hybrid.commands.model import find_model
    from sglang_hybrid.commands.report.cache import Cache
    from sglang_hybrid.commands.report.context import Context
    from sglang_hybrid.commands.report.machine import describe, size_of_this_machine
    from sglang_hybrid.commands.report.model import read_model
    from sglang_hybrid.commands.report.session.client import SessionProcess
    from sglang_hybrid.host import gpu_names
    from sglang_hybrid.policies.registry import policy_names

    assert isinstance(console, Console)
    model = read_model(find_model(options.model, console=console))
    name = size_of_this_machine() if options.size == "auto" else options.size
    size = SIZES[name].within(model.context).changed(options.set)
    has_gpu = bool(gpu_names()) if options.device is None else options.device.startswith("cuda")
    machine = describe()["machine"]
    cache = Cache(options.out / "results", fresh=options.fresh)
    context = Context(
        model=model, size=size, policies=tuple(policy_names()), has_gpu=has_gpu, machine=machine, out=options.out,
        cache=cache, device=options.device, codebooks=_codebooks(options.codebook), start=start or SessionProcess,
    )  # fmt: skip
    return context, name


def _codebooks(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the codebook files by their shape, ``GROUPS x CENTROIDS``. Raise InputError for an unusable file."""
    if not paths:
        return {}
    try:
        from sglang_hybrid.policies.hcattention.codebook_facts import read_facts  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise InputError("--codebook: this installation has no policy hcattention") from None
    found = {}
    for path in paths:
        try:
            facts = read_facts(path)
        except ValueError as error:
            raise InputError(f"--codebook {path}: {error}") from error
        found[f"{facts.groups} x {facts.centroids}"] = path.resolve()
    return found


def _command(options: argparse.Namespace, size: str) -> list[str]:
    """Return the command line that repeats this report, without --only and with file names in place of paths."""
    command = ["sglang-hybrid", "report", "--size", size]
    for setting in options.set:
        command += ["--set", setting]
    if options.model:
        command += ["--model", options.model.name if options.model.exists() else str(options.model)]
    if options.device:
        command += ["--device", options.device]
    if options.threads:
        command += ["--threads", str(options.threads)]
    for path in options.codebook:
        command += ["--codebook", path.name]
    return command


def _texts(size: Size) -> str:
    """Describe the texts on which perplexity and KL are measured, so that a reader can judge the numbers."""
    return (
        f"{size.windows} places in Python's language reference, {size.prompt_tokens} tokens before each, "
        f"{size.decode_tokens - 1} decode steps behind it"
    )


def _write(out: Path, context: Context, size: str, sections: Sequence[object]) -> None:

    from sglang_hybrid.commands.report.content import Report, Section
    from sglang_hybrid.commands.report.machine import describe, in_words
    from sglang_hybrid.commands.report.markdown import write_markdown
    from sglang_hybrid.commands.report.page import html_of

    found, model = describe(), context.model
    commit = (found["commit"] or "unknown") + (" with uncommitted changes" if found["uncommitted_changes"] else "")
    report = Report(
        title="The papers' experiments with sglang-hybrid",
        facts=(
            ("model", f"{model.name} ({model.architecture}, {model.layers} layers, context {model.context})"),
            ("machine", in_words(found["machine"])),
            ("size", size),
            ("texts", _texts(context.size)),
            ("policies", ", ".join(context.policies)),
            ("commit", commit),
            ("date", found["date"]),
            ("reading", _READING),
        ),
        sections=tuple(section for section in sections if isinstance(section, Section)),
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / PAGE).write_text(html_of(report), encoding="utf-8")
    write_markdown(out / MARKDOWN, report)
