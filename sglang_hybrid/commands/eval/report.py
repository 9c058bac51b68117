"""Report on all runs: a table for people, a file for programs, figures for both. The first run is the baseline."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_hybrid.commands.eval import plots
from sglang_hybrid.commands.eval.comparison import Comparison, compare
from sglang_hybrid.commands.eval.result import Run, TaskResult
from sglang_hybrid.commands.eval.scoring import Difference
from sglang_hybrid.origin import origin

_WIDTH_WITHOUT_TERMINAL = 160
_NOTHING = Text("-", style="dim")


# -- for people --------------------------------------------------------------------------------------------------------


def print_report(runs: Sequence[Run], console: Console | None = None) -> None:
    """Print the table and the settings of each run. Raise ValueError if the runs did not have the same prompts."""
    # rich assumes 80 columns if output is not a terminal
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)
    console.print(report_table(runs))
    for run in runs:
        settings = ", ".join(f"{key}={value}" for key, value in run.settings.items())
        console.print(Text(f"{run.name}: {settings or 'default settings'}"))


def report_table(runs: Sequence[Run]) -> Table:
    """Return a table with a column for each run and a row for each quantity that any run has measured."""
    _check(runs)
    baseline, comparisons = runs[0], [compare(runs[0], run) for run in runs]
    table = Table(
        title=f"Accuracy against {baseline.name}",
        caption=f"In brackets: 95 % interval of the difference from {baseline.name}, paired by prompt, by bootstrap.\n"
        "Red and green: the interval leaves zero out.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(Text(run.name), justify="right")
    for task in dict.fromkeys(task.task for run in runs for task in run.tasks):
        its = [_task(run, task) for run in runs]
        measured = next(result for result in its if result is not None)
        name = f"{task} ({measured.metric}, {len(measured.scores)} prompts)"
        cells = [_task_cell(result, its[0], beside) for result, beside in zip(its, comparisons, strict=True)]
        table.add_row(Text(name), *cells)
        lengths = sorted({length for result in its if result is not None for length in result.by_length})
        for length in lengths if len(lengths) > 1 else ():
            scores = [None if result is None else result.by_length.get(length) for result in its]
            table.add_row(Text(f"  {plots.tokens_label(length)} tokens"), *(_cell(score, ".1%") for score in scores))
    if any(run.perplexity is not None for run in runs):
        cells = [_perplexity_cell(run, baseline, beside) for run, beside in zip(runs, comparisons, strict=True)]
        table.add_row("perplexity", *cells)
    for name, field, form in (
        ("KL mean (nats per token)", "kl_mean", ".4f"),
        ("KL 95th percentile", "kl_p95", ".4f"),
        ("same best token", "top1_agreement", ".1%"),
        ("CPU ratio (misses / budget)", "cpu_ratio", ".1%"),
    ):
        values = [getattr(run, field) for run in runs]
        if any(value is not None for value in values):
            table.add_row(name, *(_cell(value, form) for value in values))
    return table


def _task(run: Run, name: str) -> TaskResult | None:
    return next((task for task in run.tasks if task.task == name), None)


def _cell(value: float | None, form: str) -> Text:
    return _NOTHING if value is None else Text(format(value, form))


def _task_cell(result: TaskResult | None, baseline: TaskResult | None, beside: Comparison) -> Text:
    if result is None:
        return _NOTHING
    text = Text(f"{result.score:.1%}")
    if result is not baseline and (difference := beside.tasks.get(result.task)):
        text.append(" " + _points(difference), style=_style(difference, worse_is_less=True))
    return text


def _points(difference: Difference) -> str:
    """Return the difference and its interval in percentage points."""
    mean, low, high = (f"{100 * value:+.1f}" for value in (difference.mean, difference.low, difference.high))
    return f"{mean} [{low}, {high}]"


def _perplexity_cell(run: Run, baseline: Run, beside: Comparison) -> Text:
    text = _cell(run.perplexity, ".3f").copy()
    if run is not baseline and run.perplexity is not None and (change := beside.perplexity):
        text.append(
            f" {change.mean:+.2%} [{change.low:+.2%}, {change.high:+.2%}]", style=_style(change, worse_is_less=False)
        )
    return text


def _style(difference: Difference, worse_is_less: bool) -> str:
    if not difference.clear:
        return "dim"
    return "red" if (difference.mean < 0) == worse_is_less else "green"


# -- for programs ------------------------------------------------------------------------------------------------------


def document(runs: Sequence[Run], command: str | None = None) -> dict[str, object]:
    """Return the content of ``eval.json``. ``command``: the command line, if ``sys.argv`` is not the user's."""
    _check(runs)
    written_by = origin()
    if command is not None:
        written_by["command"] = command
    return {"origin": written_by, "baseline": runs[0].name, "runs": [_entry(runs[0], run) for run in runs]}


def _entry(baseline: Run, run: Run) -> dict[str, object]:
    entry = dataclasses.asdict(run)
    for task, result in zip(entry["tasks"], run.tasks, strict=True):
        task["score"] = result.score
    against = None if run is baseline else dataclasses.asdict(compare(baseline, run))
    return {key: _plain(value) for key, value in {**entry, "difference_from_baseline": against}.items()}


def _plain(value: object) -> object:
    """Convert a value to what JSON can hold: infinities and NaN become None, paths become strings."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def write_json(path: Path, runs: Sequence[Run], command: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(runs, command), indent=1, allow_nan=False) + "\n")
    return path


def _check(runs: Sequence[Run]) -> None:
    names = [run.name for run in runs]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"runs {names}: a report needs at least one, and a different name for each")


# -- both --------------------------------------------------------------------------------------------------------------


def write_report(directory: Path, runs: Sequence[Run], command: str | None = None) -> list[Path]:
    """Write ``eval.json`` and the figures that there is data for. Return the paths of the written files."""
    written = [write_json(directory / "eval.json", runs, command)]
    grids = {run.name: run.needle for run in runs if run.needle is not None}
    if grids:
        written.append(plots.needle_heat_maps(directory / "needle.png", grids))
    if any(run.perplexity is not None or run.kl_mean is not None for run in runs):
        written.append(plots.text_bars(directory / "perplexity.png", runs))
    return written
