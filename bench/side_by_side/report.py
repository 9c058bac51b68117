"""Prints a result as tables: points, ablation, breakdown, metrics and aims."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.side_by_side import metrics
from bench.side_by_side.claims import best, lengths_of, tokens_label

Result = dict[str, Any]
Point = dict[str, Any]


def print_result(result: Result, console: Console) -> None:
    points = result["points"]
    tables = (
        points_table(points),
        ablation_table(result),
        breakdown_table(points),
        metrics_table(points),
        claims_table(result),
    )
    for table in tables:
        if table is not None:
            console.print(table)
    for note in result["notes"]:
        console.print(f"- {note}", style="dim", markup=False, highlight=False)


def points_table(points: list[Point]) -> Table:
    table = Table(title="decode throughput")
    names = (
        "input",
        "run",
        "rows",
        "fits",
        "tokens/s",
        "p10 to p90",
        "ms a step",
        "against stock",
        "CPU ratio",
        "GPU GB",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "run" else "right")
    for length in lengths_of(points):
        theirs = best(points, "stock", length)
        for one in (one for one in points if one["length"] == length):
            table.add_row(
                tokens_label(length),
                one["configuration"],
                str(one["rows"]),
                str(one["capacity"]["rows"]),
                f"{one['tokens_per_s']:,.1f}",
                f"{one['tokens_per_s_p10']:,.0f} to {one['tokens_per_s_p90']:,.0f}",
                f"{one['step_ms']:.2f}",
                f"{one['tokens_per_s'] / theirs['tokens_per_s']:.2f}x" if theirs else "",
                _percent(metrics.named(one["metrics"], "cpu_compute_ratio")),
                f"{measured / 1e9:.1f}" if (measured := one.get("gpu_bytes_measured")) else "",
            )
        table.add_section()
    return table


def ablation_table(result: Result) -> Table | None:
    runs = result["ablation"]
    if not runs:
        return None
    table = Table(title=f"ablation, {tokens_label(runs[0]['length'])}, {runs[0]['rows']} rows")
    for name in ("run", "tokens/s", "ms a step", "CPU ratio", "settings"):
        table.add_column(name, justify="left" if name in ("run", "settings") else "right")
    for one in runs:
        ratio = _percent(metrics.named(one["metrics"], "cpu_compute_ratio"))
        numbers = (f"{one['tokens_per_s']:,.1f}", f"{one['step_ms']:.2f}")
        table.add_row(one["part"], *numbers, ratio, " ".join(one["settings"]))
    return table


def breakdown_table(points: list[Point]) -> Table | None:
    profiled = [one for one in points if one.get("breakdown", {}).get("categories")]
    if not profiled:
        return None
    table = Table(title="ms of a step while profiled: busy (alone)")
    table.add_column("category")
    for one in profiled:
        table.add_column(f"{one['configuration']}\n{tokens_label(one['length'])} x {one['rows']}", justify="right")
    names = list(dict.fromkeys(name for one in profiled for name in one["breakdown"]["categories"]))
    for name in names:
        cells = [one["breakdown"]["categories"].get(name) for one in profiled]
        table.add_row(name, *(f"{cell['busy_ms']:.2f} ({cell['alone_ms']:.2f})" if cell else "" for cell in cells))
    table.add_row("idle", *(f"{one['breakdown']['idle_ms']:.2f}" for one in profiled))
    table.add_row("step", *(f"{one['breakdown']['step_ms']:.2f}" for one in profiled))
    table.add_row("idle or waiting, without profiler", *map(_idle_share, profiled))
    return table


def metrics_table(points: list[Point]) -> Table | None:
    """Return a table of all metrics that the backend reports, as rises of counters and last values of others."""
    reported = [one for one in points if one["metrics"]]
    if not reported:
        return None
    table = Table(title="metrics of the hybrid backend")
    table.add_column(f"{metrics.PREFIX}...")
    for one in reported:
        table.add_column(f"{one['configuration']}\n{tokens_label(one['length'])} x {one['rows']}", justify="right")
    for name in dict.fromkeys(name for one in reported for name in one["metrics"]):
        if "_created" not in name and "_bucket" not in name:
            cells = [one["metrics"].get(name) for one in reported]
            table.add_row(name.removeprefix(metrics.PREFIX), *("" if cell is None else f"{cell:g}" for cell in cells))
    return table


def claims_table(result: Result) -> Table | None:
    if not result["claims"]:
        return None
    table = Table(title="aims")
    for name in ("what", "aim", "measured", "reached"):
        table.add_column(name)
    words = {True: "yes", False: "no", None: ""}
    for one in result["claims"]:
        measured = "not measured" if one["measured"] is None else f"{one['measured']:.2f}x"
        table.add_row(one["what"], f"{one['aim']}x" if one["aim"] else "", measured, words[one["reached"]])
    return table


def _idle_share(point: Point) -> str:
    return _percent(point["breakdown"].get("without_profiler", {}).get("idle_or_waiting_share"))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
