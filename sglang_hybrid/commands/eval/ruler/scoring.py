"""NVIDIA's two metrics, for machines without NVIDIA's package. A test compares the metrics with the originals."""

from __future__ import annotations

import re
from collections.abc import Sequence

PREFIX = "ruler:"
MEAN = "ruler"  # name of the result over all tasks
_CONTROL = re.compile(r"[\x00-\x1f]")


def score(metric: str, text: str, answers: Sequence[str]) -> float:
    """Return the score of ``text``, 0 to 1. ``metric``: its name in NVIDIA's package. Raise ValueError if unknown."""
    said = _CONTROL.sub("\n", text).lower()
    found = [answer.lower() in said for answer in answers]
    match metric:
        case "string_match_all":
            return sum(found) / len(found)
        case "string_match_part":
            return float(any(found))
    raise ValueError(f"there is no metric {metric!r} of RULER")
