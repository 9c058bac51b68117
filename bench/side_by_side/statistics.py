"""Throughput of a batch while all of its rows decode, from the times at which each row's tokens arrived."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any


class NotSteady(RuntimeError):
    """Raised if there was no time in which all rows decoded."""


@dataclass
class Arrivals:
    """Arrivals of one row's tokens: at ``times[n]`` the client had ``tokens[n]`` tokens. Both lists rise."""

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # token ids
    meta: dict[str, Any] = field(default_factory=dict)  # SGLang's meta_info of the answer, sent with its last token

    def at(self, time: float) -> float:
        """Return the tokens at ``time``; between two arrivals tokens are taken to come evenly."""
        after = bisect_right(self.times, time)
        if after == 0:
            return 0.0
        if after == len(self.times):
            return float(self.tokens[-1])
        begin, end = self.times[after - 1], self.times[after]
        share = (time - begin) / (end - begin)
        return self.tokens[after - 1] + share * (self.tokens[after] - self.tokens[after - 1])

    def when(self, tokens: int) -> float:
        """Return the time of the first arrival with at least ``tokens`` tokens."""
        return next(time for time, count in zip(self.times, self.tokens, strict=True) if count >= tokens)


@dataclass(frozen=True)
class Slice:
    """A part of the time in which all rows decode: its length, and the tokens of all rows in it."""

    seconds: float
    tokens: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def steady_slices(rows: list[Arrivals], warm_tokens: int, slices: int) -> list[Slice]:
    """Divide the steady time of all rows (see ``steady_time``) into ``slices`` equal parts."""
    begin, end = steady_time(rows, warm_tokens)
    edges = [begin + (end - begin) * n / slices for n in range(slices + 1)]
    counts = [sum(row.at(edge) for row in rows) for edge in edges]
    return [Slice((end - begin) / slices, counts[n + 1] - counts[n]) for n in range(slices)]


def steady_time(rows: list[Arrivals], warm_tokens: int) -> tuple[float, float]:
    """Return when the last row has ``warm_tokens`` tokens, and when the first row is done. Raise NotSteady.

    The first steps of a row are not steady: the scheduler still prefills others, and hybrid fills its slots.
    """
    if any(not row.tokens or row.tokens[-1] < warm_tokens for row in rows):
        raise NotSteady(f"a row got fewer than {warm_tokens} tokens")
    begin, end = max(row.when(warm_tokens) for row in rows), min(row.times[-1] for row in rows)
    if end <= begin:
        raise NotSteady("the first row was done before the last one began: the answers are too short for this batch")
    return begin, end


def summary(slices: list[Slice], rows: int) -> dict[str, Any]:
    """Return median and spread of throughput over slices, which may come from several runs."""
    rates = sorted(one.rate for one in slices)
    median = statistics.median(rates)
    return {
        "tokens_per_s": round(median, 1),
        "tokens_per_s_p10": round(quantile(rates, 0.1), 1),
        "tokens_per_s_p90": round(quantile(rates, 0.9), 1),
        "step_ms": round(1e3 * rows / median, 3),
        "slices": len(rates),
        "steady_seconds": round(sum(one.seconds for one in slices), 3),
    }


def course(slices: list[Slice], parts: int) -> list[float]:
    """Return tokens per second in each of ``parts`` equal parts of an answer, medians over the runs in ``slices``."""
    return [round(statistics.median(one.rate for one in slices[part::parts]), 1) for part in range(parts)]


def quantile(rising: list[float], share: float) -> float:
    """Return the quantile ``share`` of ``rising``, linear between neighbours."""
    place = share * (len(rising) - 1)
    below = int(place)
    above = min(below + 1, len(rising) - 1)
    return rising[below] + (place - below) * (rising[above] - rising[below])
