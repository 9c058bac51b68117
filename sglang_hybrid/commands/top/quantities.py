"""Numbers as text."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN = "-"
_BARS = "▁▂▃▄▅▆▇█"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}{unit and ' '}{unit}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def milliseconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def size(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    power = 0
    while value >= 1024 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.{0 if power == 0 else 1}f} {_UNITS[power]}"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the last ``width`` values as bars from zero, with a gap for None."""
    shown = values[-width:] if width > 0 else []
    top = max((value for value in shown if value is not None), default=0.0) or 1.0
    bars = "".join(
        " " if value is None else _BARS[min(int(value / top * len(_BARS)), len(_BARS) - 1)] for value in shown
    )
    return bars.rjust(max(width, 0))
