"""One bar over a long piece of work, with the time that is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Steps:
    def __init__(self, progress: Progress, total: float) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        if not self._progress.console.is_terminal:  # where no bar is drawn, a line says how far it is
            done = self._progress.tasks[self._task].percentage
            self._progress.console.print(f"{done:3.0f} % {text}")

    def advance(self, cost: float = 1.0) -> None:
        self._progress.advance(self._task, cost)


@contextmanager
def steps(console: Console, total: float) -> Iterator[Steps]:
    """``total``: the sum of all costs, in any unit."""
    columns = (TextColumn("{task.description:50}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        yield Steps(progress, total)
