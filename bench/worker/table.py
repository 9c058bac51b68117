"""Prints results as tables for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from bench.worker.attention import Rate
from bench.worker.progress import counted
from bench.worker.results import Results

_WIDTH_WITHOUT_TERMINAL = 160


def print_results(results: Results) -> None:
    print_table(
        "Block attention as its client sees it: GB/s of keys and values, posts one after the other, the next one\n"
        "written while one is computed (percent of what the same threads read right before or after)",
        *attention_table(results, lambda rate: rate.median),
    )
    print_table(
        "Inside the worker, of the time in which posts were under way",
        *attention_table(results, lambda rate: rate.engine),
    )
    for provider in dict.fromkeys(point.variant for point in results.points if not point.is_native):
        print_table(f"Fastest native variant and provider {provider}", *provider_table(results, provider))
    print(f"host read bandwidth: {results.host_read:.1f} GB/s")
    if trip := results.round_trip:
        for what, times in (("collected", trip.collected), ("answered, not collected", trip.answered)):
            print(
                f"round trip of {trip.rows} rows without blocks, {counted(trip.threads, 'thread')} awake, {what}: "
                f"median {times.median:.1f} us, p99 {times.p99:.1f} us, min {times.min:.1f} us"
            )
        print(f"(an empty call from Python into the library takes {trip.python_call:.2f} us)")
    for note in results.notes:
        print(f"note: {note}")


def attention_table(results: Results, rate_of: Callable[[Rate], float | None]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table with one column for each number of blocks per task.

    ``rate_of`` returns the GB/s to show, or None to leave the cell empty.
    """
    columns = sorted({point.blocks for point in results.points})
    series: dict[tuple[str, str, int], dict[int, str]] = {}
    for point in results.points:
        if rate := rate_of(point.rate):
            cell = f"{rate:.1f} ({rate / results.read_beside(point):.0%})"
            series.setdefault((point.dtype, point.variant, point.threads), {})[point.blocks] = cell
    # dtypes and variants in the order in which they were measured, then by number of threads
    order = [list(dict.fromkeys(key[part] for key in series)) for part in (0, 1)]
    rows = []
    for key in sorted(series, key=lambda key: (order[0].index(key[0]), order[1].index(key[1]), key[2])):
        dtype, variant, threads = key
        cells = [series[key].get(blocks, "") for blocks in columns]
        rows.append([dtype, variant, str(threads), f"{results.read(threads):.1f}", *cells])
    return ["dtype", "variant", "threads", "reading", *(counted(blocks, "block") for blocks in columns)], rows


def provider_table(results: Results, provider: str) -> tuple[list[str], list[list[str]]]:
    rows = []
    for point in results.points:
        if point.variant == provider:
            ratio = results.native_to(point)
            rates = (ratio * point.rate.median, point.rate.median, ratio)
            shape = (str(point.threads), str(point.blocks))
            rows.append([point.dtype, *shape, *(f"{rate:.1f}" for rate in rates)])
    return ["dtype", "threads", "blocks", "native GB/s", f"{provider} GB/s", f"native / {provider}"], rows


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with rich if rich is installed, else as plain text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain_table(title, header, rows))
        return
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, justify="left" if name in ("dtype", "variant") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # without a width, rich assumes 80 columns for a file
    Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL).print(table)


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join([title, *lines])
