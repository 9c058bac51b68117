"""The view in a terminal: boxes that fit the terminal's size, redrawn at least every second."""

from __future__ import annotations

import threading
import time
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sglang_hybrid.commands.top import panels
from sglang_hybrid.commands.top.keys import Keys
from sglang_hybrid.commands.top.server import Kind, Server
from sglang_hybrid.commands.top.watch import Problem, State, Watch

_COLUMNS = ((3, 110), (2, 76), (1, 0))  # (boxes side by side, minimum width of the terminal)
_FEWEST_MAP_LINES, _MOST_MAP_LINES = 6, 28  # lines of a heat map with its frame
_ONCE_LINES = 52  # height of the view for --once, which has no screen to fill
_REDRAW_SECONDS = 1.0  # maximum time between redraws: the view counts how long a server has been away


def watch_in_terminal(server: Server, interval: float) -> int:
    """Refresh the view until q or Ctrl-C, and return the exit status."""
    watch = Watch(server, interval)
    stop = threading.Event()
    threading.Thread(target=watch.run, args=(stop,), daemon=True).start()
    console = Console(highlight=False)
    try:
        with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while not keys.asked_to_quit(min(interval, _REDRAW_SECONDS)):
                live.update(view(watch.state(), console.width, console.height), refresh=True)
    except KeyboardInterrupt:
        pass  # Ctrl-C is a normal way to end the view
    finally:
        stop.set()
    return 0


def print_once(state: State) -> None:
    console = Console(highlight=False)
    console.print(view(state, console.width, _ONCE_LINES))


def view(state: State, width: int, height: int) -> RenderableType:
    """Return all boxes for a screen of this size. The screen cuts off what does not fit: the least urgent is last."""
    shown = panels.Shown(state)
    head: list[RenderableType] = [_header(state)]
    if state.problem:
        head.append(_banner(state.problem, state.time))
    elif not state.points:
        head.append(Text(f"waiting for the first answer of {state.url}", style="dim"))
    columns = next(columns for columns, least in _COLUMNS if width >= least)
    part = width // columns
    numbers = [panels.requests(shown, part), panels.decode(shown, part), panels.cpu_share(shown, part)]
    rest = [panels.bandwidth(shown, part), panels.worker(shown), panels.memory(shown, part)]
    first, later = (numbers, rest) if columns == 3 else (numbers[:2], [*numbers[2:], *rest])
    above: list[RenderableType] = [*head, _grid(first, columns, width)]
    below: list[RenderableType] = [_grid(later, columns, width), panels.settings(state)]
    left = height - 1 - sum(_lines_of(each, width) for each in (*above, *below))
    lines = min(max(left if columns > 1 else left // 2, _FEWEST_MAP_LINES), _MOST_MAP_LINES)
    maps = [panels.ratio_map(shown, lines), panels.interval_map(shown, lines)]
    return Group(*above, _grid(maps, min(2, columns), width), *below)


def _header(state: State) -> Text:
    info = state.latest.info
    text = Text("sglang-hybrid top", style="bold", no_wrap=True, overflow="ellipsis")
    text.append(f"  {state.model or ''}  {state.url}", style="not bold")
    known = (f"{key} {info[key]}" for key in ("policy", "engine", "prediction", "version", "sglang") if key in info)
    text.append("  " + ", ".join(known), style="dim not bold")
    return text.append(f"  {time.strftime('%H:%M:%S', time.localtime(state.time))}  q quits", style="dim not bold")


def _banner(problem: Problem, now: float) -> Panel:
    away = ""
    if problem.kind is not Kind.STOCK:
        since = time.strftime("%H:%M:%S", time.localtime(problem.since))
        away = f"no answer since {since} ({max(0.0, now - problem.since):.0f} s), asking on: "
        if problem.kind is not Kind.NO_ANSWER:
            away = f"nothing to show since {since}, asking on: "
    style = "yellow" if problem.kind is Kind.STOCK else "red"
    return Panel(Text(away + problem.text), border_style=style)


def _grid(boxes: list[Panel], columns: int, width: int) -> Table:
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    for first in range(0, len(boxes), columns):
        line = boxes[first : first + columns]
        height = max(_lines_of(box, width // columns) for box in line)
        for box in line:
            box.height = height
        grid.add_row(*line)
    return grid


def _lines_of(part: RenderableType, width: int) -> int:
    measuring = Console(width=width, color_system=None, file=StringIO())
    return len(measuring.render_lines(part))
