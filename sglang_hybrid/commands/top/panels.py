"""Boxes of the terminal view: each function makes one box, a title and lines, from the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sglang_hybrid.commands.top import names
from sglang_hybrid.commands.top.heat_map import Column, HeatMap
from sglang_hybrid.commands.top.point import Point
from sglang_hybrid.commands.top.quantities import milliseconds, number, percent, size, sparkline
from sglang_hybrid.commands.top.watch import State

NOT_EXPORTED = "not exported by this engine"
PATHS = {
    "worker": "worker reads",
    "gather": "GPU gathers",
    "device": "GPU reads",
    "process": "server reads",
    "recall": "GPU recalls",
}
_FRAME = 2  # lines, and columns, that the frame of a box takes


@dataclass(frozen=True)
class Shown:
    """A state and its last answered point, which the view shows while the server is away."""

    state: State
    now: Point = field(init=False)

    def __post_init__(self) -> None:
        answered = [point for point in self.state.points if point.answered]
        empty = Point(number=0, time=self.state.time, answered=False)
        object.__setattr__(self, "now", answered[-1] if answered else empty)

    def has(self, *metrics: str) -> bool:
        """True if one of the metrics is exported."""
        return any(metric not in self.state.latest.not_exported for metric in metrics)

    def over_time(self, value: Callable[[Point], float | None]) -> list[float | None]:
        return [value(point) for point in self.state.points]


def requests(shown: Shown, width: int) -> Panel:
    now = shown.now
    return _lines(
        "requests",
        width,
        [
            ("running", number(now.running), shown.over_time(lambda point: point.running)),
            ("queued", number(now.queued), shown.over_time(lambda point: point.queued)),
            _exported(shown, names.DECODE_ROWS, "decode rows", number(now.rows), shown.over_time(lambda p: p.rows)),
            _exported(shown, names.WHOLE_REQUESTS, "whole on GPU", _yes_no(now.whole_requests), ()),
        ],
    )


def decode(shown: Shown, width: int) -> Panel:
    step, wait = shown.now.decode_step, shown.now.worker_wait
    steps = shown.over_time(lambda point: point.decode_step.mean_ms if point.decode_step else None)
    waits = shown.over_time(lambda point: point.worker_wait.mean_ms if point.worker_wait else None)
    return _lines(
        "decode",
        width,
        [
            ("tokens/s", number(shown.now.tokens_per_s, 1), shown.over_time(lambda point: point.tokens_per_s)),
            _exported(shown, names.DECODE_STEP, "step, mean", milliseconds(step.mean_ms if step else None), steps),
            _exported(shown, names.WORKER_WAIT, "worker wait", milliseconds(wait.mean_ms if wait else None), waits),
            _exported(shown, names.WORKER_WAIT, "  99 % below", milliseconds(wait.p99_ms if wait else None), ()),
        ],
    )


def cpu_share(shown: Shown, width: int) -> Panel:
    cosines = [value for value in shown.state.latest.calibration_cosine if value is not None]
    worst = f"{min(cosines):.3f} at worst" if cosines else "-"
    ratios = shown.over_time(lambda point: point.cpu_ratio)
    hits = shown.over_time(lambda point: point.hit_ratio)
    return _lines(
        "GPU and CPU",
        width,
        [
            _exported(shown, names.CPU_RATIO, "CPU compute ratio", percent(shown.now.cpu_ratio), ratios),
            _exported(shown, names.HIT_RATIO, "resident hits", percent(shown.now.hit_ratio), hits),
            _exported(shown, names.COSINE, "prediction cosine", worst, ()),
        ],
    )


def ratio_map(shown: Shown, height: int) -> Panel:
    columns = [tuple(None if v is None else 100 * v for v in point.layer_cpu_ratio) for point in shown.state.points]
    return _map("CPU compute ratio: layers over time", columns, 10.0, "%", height)


def interval_map(shown: Shown, height: int) -> Panel:
    columns = [tuple(steps or None for steps in point.layer_recall_interval) for point in shown.state.points]
    if any(columns) and not any(any(column) for column in columns):
        return _box("recall interval: layers over time", Text("no layer recalls", style="dim"))
    return _map("recall interval: layers over time", columns, 10.0, "steps", height)


def bandwidth(shown: Shown, width: int) -> Panel:
    if not shown.has(names.MISS_BYTES, names.RECALL_BYTES):
        return _box("bandwidth", Text(NOT_EXPORTED, style="dim"))
    known = shown.now.gb_per_s
    return _lines(
        "bandwidth",
        width,
        [
            (
                PATHS.get(path, path),
                number(known.get(path), 2, "GB/s"),
                shown.over_time(lambda point, path=path: point.gb_per_s.get(path)),  # type: ignore[misc]
            )
            for path in (*PATHS, *(path for path in known if path not in PATHS))
            if path in known
        ]
        or [("bytes/s", "-", ())],
    )


def worker(shown: Shown) -> Panel:
    latest, rates = shown.state.latest, shown.now.miss_rows_per_s
    lines: list[RenderableType] = []
    if not latest.workers:
        lines.append(Text(f"worker  {NOT_EXPORTED}", style="dim"))
    for one in latest.workers:
        state = Text("up", style="green") if one.up else Text("down" if one.up is False else "-", style="red")
        rank = f"rank {one.rank}" + (f" of replica {one.replica}" if one.replica not in ("", "0") else "")
        line = Text(f"worker  {rank}  ").append(state)
        line.append(f"  restarts {number(one.restarts)}")
        if one.degraded:
            line.append("  degraded: the server computes in its place", style="bold red")
        lines.append(line)
    if not latest.miss_rows:
        # the counter does not exist before the worker has served its first row
        why = "none yet" if shown.has(names.MISS_ROWS, names.WORKER_UP) else NOT_EXPORTED
        lines.append(Text(f"misses  {why}", style="dim"))
        return _box("worker and fallbacks", Group(*lines))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    for _ in range(2):
        grid.add_column(justify="right", no_wrap=True)
    grid.add_row("served by", "now", "in all", style="dim")
    for by, rows in latest.miss_rows.items():
        style = "" if by == "worker" else "yellow"
        grid.add_row(f"  {by}", f"{number(rates.get(by))}/s", number(rows), style=style)
    lines.append(grid)
    return _box("worker and fallbacks", Group(*lines))


def memory(shown: Shown, width: int) -> Panel:
    now = shown.now
    lines: list[RenderableType] = []
    for title, used, whole, text, metric in (
        ("host pool", now.pool_used_bytes, now.pool_bytes, size, names.POOL),
        ("GPU slots", now.slots_used, now.slots, number, names.SLOTS),
    ):
        if not shown.has(metric):
            lines.append(Text(f"{title}  {NOT_EXPORTED}", style="dim"))
            continue
        amount = f"{text(used)} of {text(whole)}"
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=whole or 1, completed=used or 0, width=max(4, width - len(amount) - 16))
        grid.add_row(title, bar, Text(amount, no_wrap=True))
        lines.append(grid)
    return _box("memory", Group(*lines))


def settings(state: State) -> Panel:
    if state.settings is None:
        return _box("settings", Text("the server does not tell", style="dim"))
    pairs = (f"{key}={value}" for key, value in state.settings.items())
    return _box("settings", Text("  ".join(pairs), style="dim", overflow="fold"))


def _box(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="bright_black", padding=(0, 1))


def _yes_no(share: float | None) -> str:
    """Return yes, no, or a percentage, for the share of ranks for which something holds."""
    return percent(share) if share not in (0, 1) else "yes" if share else "no"


_Line = tuple[str, str, Sequence[float | None]]  # title, value, values over time


def _exported(shown: Shown, metric: str, title: str, value: str, over_time: Sequence[float | None]) -> _Line:
    return (title, value, over_time) if shown.has(metric) else (title, NOT_EXPORTED, ())


def _lines(title: str, width: int, lines: Sequence[_Line]) -> Panel:
    longest = max(len(name) for name, _value, _over_time in lines)
    bars = width - longest - 12 - 2 * _FRAME - 2
    grid = Table.grid(padding=(0, 1))
    for name, value, over_time in lines:
        if value == NOT_EXPORTED:
            grid.add_row(Text(name), Text(value, style="dim"))
            continue
        cell = Text(f"{value:>12} ", style="bold")
        grid.add_row(Text(name), cell.append(sparkline(over_time, bars), style="cyan not bold"))
    return _box(title, grid)


def _map(title: str, columns: Sequence[Column], least: float, unit: str, height: int) -> Panel:
    if not any(columns):
        return _box(title, Text(NOT_EXPORTED, style="dim"))
    return _box(title, HeatMap(columns, least, unit, height - _FRAME))
