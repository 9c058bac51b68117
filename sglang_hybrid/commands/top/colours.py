"""Colours of a heat map: from dark blue over green to yellow, in steps that look even."""

from __future__ import annotations

from collections.abc import Iterable

_STOPS = ((34, 32, 68), (46, 84, 138), (33, 145, 140), (94, 201, 98), (253, 231, 37))
SHADES = " .:-=+*#%@"  # for a terminal without colours

Colour = tuple[int, int, int]


def colour(share: float) -> Colour:
    """Return the colour (red, green, blue) at ``share`` of the scale, which is clamped to 0 to 1."""
    at = min(max(share, 0.0), 1.0) * (len(_STOPS) - 1)
    first = min(int(at), len(_STOPS) - 2)
    part = at - first
    red, green, blue = (
        round(low + part * (high - low)) for low, high in zip(_STOPS[first], _STOPS[first + 1], strict=True)
    )
    return red, green, blue


def shade(share: float) -> str:
    return SHADES[min(int(min(max(share, 0.0), 1.0) * len(SHADES)), len(SHADES) - 1)]


def top_of_scale(values: Iterable[float | None], least: float) -> float:
    """Return the end of a scale: ``least`` times 1, 2, 5, 10 and so on, at or above all values.

    Few possible ends keep the scale still: a scale that jumps cannot be read.
    """
    largest = max((value for value in values if value is not None), default=0.0)
    top = least
    while top < largest:
        for factor in (2.0, 2.5, 2.0):  # 1, 2, 5, 10
            top *= factor
            if top >= largest:
                return top
    return top
