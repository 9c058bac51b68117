"""Progress of a report, for the person at the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

_STYLES = {"measured": "green", "arithmetic": "green", "skipped": "dim", "failed": "bold red"}


class ReportProgress:
    """Two progress bars (experiments, running measurement) at a terminal, and a line for each finished experiment."""

    def __init__(self, console: Console, experiments: int) -> None:
        self._console = console
        text = TextColumn("{task.description}", markup=False)
        self._progress = Progress(text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=console)
        self._all = self._progress.add_task("experiments", total=experiments)
        self._one = self._progress.add_task("", total=1.0)
        self._name = ""

    def __enter__(self) -> ReportProgress:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begins(self, name: str) -> None:
        self._name = name
        self._progress.reset(self._one, description=f"{name}", total=1.0)

    def progress(self, text: str, part: float) -> None:
        """Advance the running measurement's bar by ``part``, a share of 1. A sum above 1 restarts the bar."""
        done = self._progress.tasks[self._one].completed
        if done + part > 1.001:
            self._progress.reset(self._one, total=1.0)
        self._progress.update(self._one, description=f"{self._name}: {text}"[:60], advance=part)

    def ends(self, name: str, status: str, seconds: float) -> None:
        self._progress.advance(self._all)
        done, total = self._progress.tasks[self._all].completed, self._progress.tasks[self._all].total
        self._console.print(f"[{_STYLES[status]}]{status:10}[/] {name} ({seconds:.0f} s, {done:.0f} of {total:.0f})")
