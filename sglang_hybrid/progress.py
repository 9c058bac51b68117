"""Progress bar for a long command, with an estimate of the time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Cost of one row's decode step in units of one prefilled token, for the estimate of the time left.
DECODE_STEP_COST = 60.0
_LINE_EVERY = 10  # percent between two lines where no bar is drawn


class Steps:
    def __init__(self, progress: Progress, total: float) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._said = 0.0  # percent shown in the last line

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        self._print_line()

    def advance(self, cost: float = 1.0) -> None:
        self._progress.advance(self._task, cost)
        if self._percentage >= self._said + _LINE_EVERY:
            self._print_line()

    @property
    def _percentage(self) -> float:
        return self._progress.tasks[self._task].percentage

    def _print_line(self) -> None:
        if not self._progress.console.is_terminal:  # no bar is drawn: print a line instead
            self._said = self._percentage
            self._progress.console.print(f"{self._said:3.0f} % {self._progress.tasks[self._task].description}")


@contextmanager
def steps(console: Console, total: float) -> Iterator[Steps]:
    """Show a progress bar within this context. ``total`` is the sum of all costs that ``advance`` gets, in any unit."""
    text = TextColumn("{task.description:50}")
    columns = (text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        yield Steps(progress, total)
