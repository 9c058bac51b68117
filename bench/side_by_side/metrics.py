"""Parses what a server's /metrics reports about the hybrid backend."""

from __future__ import annotations

import re

PREFIX = "sglang_hybrid_"
_SAMPLE = re.compile(r"^(\w+(?:\{[^}]*\})?) (\S+)", re.MULTILINE)


def parse(text: str, prefix: str = PREFIX) -> dict[str, float]:
    """Return the samples whose names begin with ``prefix``, by name and labels."""
    return {name: float(value) for name, value in _SAMPLE.findall(text) if name.startswith(prefix)}


def during(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the rise of each counter and the last value of every other metric."""
    return {name: round(value - before.get(name, 0.0) if counts(name) else value, 6) for name, value in after.items()}


def counts(name: str) -> bool:
    """Return True if ``name`` is a counter or a part of a histogram, which only rise."""
    return name.split("{", 1)[0].endswith(("_total", "_count", "_sum", "_bucket"))


def named(metrics: dict[str, float], name: str) -> float | None:
    """Return the mean over labels (ranks) of one metric; None if the server does not report the metric."""
    values = [value for key, value in metrics.items() if key.split("{", 1)[0] == PREFIX + name]
    return sum(values) / len(values) if values else None
