"""Kills the CPU worker under load: measures the cost and compares the answers with those of undisturbed runs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import psutil

from bench.side_by_side import metrics
from bench.side_by_side.load import send_together
from bench.side_by_side.server import Server
from bench.side_by_side.statistics import Arrivals
from bench.side_by_side.telling import say

_BY = re.compile(r'^sglang_hybrid_miss_rows_total\{.*\bby="([^"]+)"')


def worker_of(pid: int) -> psutil.Process | None:
    """Return the running CPU worker among the children of the server process ``pid``; None if there is none."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "cpu_worker" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    return process
    return None


def first_differences(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> list[int | None]:
    """Return for each answer the index of the first token that differs between two runs; None if none does."""
    found: list[int | None] = []
    for a, b in zip(one, other, strict=True):
        shared = min(len(a), len(b))
        different = next((n for n in range(shared) if a[n] != b[n]), shared)
        found.append(None if different == len(a) == len(b) else different)
    return found


def decode_rate(rows: Sequence[Arrivals]) -> float | None:
    """Return tokens per second while all rows decode; None if there was no such time."""
    begin, end = max(row.times[0] for row in rows), min(row.times[-1] for row in rows)
    if end <= begin:
        return None
    return round(sum(row.at(end) - row.at(begin) for row in rows) / (end - begin), 1)


def longest_pause(rows: Sequence[Arrivals], since: float = 0.0, until: float = math.inf) -> float:
    """Return the longest seconds between two messages of one answer, among pauses that touch ``since`` to ``until``."""
    gaps = [b - a for row in rows for a, b in zip(row.times, row.times[1:], strict=False) if b >= since and a <= until]
    return round(max(gaps, default=0.0), 3)


def served(counted: dict[str, float]) -> dict[str, int]:
    """Return the number of rows whose misses were served, by who served them (label ``by``)."""
    found: dict[str, int] = {}
    for name, value in counted.items():
        if (match := _BY.match(name)) and value:
            found[match[1]] = found.get(match[1], 0) + int(value)
    return found


class Load:
    """A fixed set of requests that can be sent to a server again and again."""

    def __init__(self, server: Server, prompts: list[list[int]], new_tokens: int, seconds: float) -> None:
        self._server, self._prompts, self._new, self._seconds = server, prompts, new_tokens, seconds

    def prime(self) -> None:
        """Put the prompts into the radix cache, so that every later run computes them in the same way."""
        for prompt in self._prompts:
            send_together(self._server.url, [prompt], 1, seconds=self._seconds)

    def run(self, name: str, kill_after: int = 0) -> tuple[list[list[int]], dict[str, Any]]:
        """Send all requests; return the answers' token ids, and figures.

        ``kill_after``: kill the worker once every answer has so many tokens; 0: do not kill it.
        """
        before, when, replaced = self._server.metrics(), 0.0, None

        async def kill(_session: aiohttp.ClientSession) -> None:
            nonlocal when, replaced
            if (worker := worker_of(self._server.pid)) is None:
                raise RuntimeError("there is no worker to kill")
            when = time.monotonic()
            os.kill(worker.pid, signal.SIGKILL)
            replaced = await self._seconds_until_replaced(worker.pid)

        rows = send_together(
            self._server.url, self._prompts, self._new, kill if kill_after else None,
            beside_after=max(1, kill_after), seconds=self._seconds,
        )  # fmt: skip
        time.sleep(1.0)  # a GPU server updates its metrics some steps later
        counted = metrics.during(before, self._server.metrics())
        figures: dict[str, Any] = {
            "finished": sum(len(row.ids) == self._new for row in rows),
            "tokens_per_s": decode_rate(rows),
            "longest_pause_s": longest_pause(rows),
            "miss_rows_by": served(counted),
            "metrics": counted,
        }
        if when:
            figures["killed_after_s"] = round(when - rows[0].sent, 2)
            figures["longest_pause_after_kill_s"] = longest_pause(rows, when)
            figures["new_worker_after_s"] = replaced
        say(f"{name}: {figures['finished']} of {len(rows)} finished, {figures['tokens_per_s']} tokens/s")
        return [row.ids for row in rows], figures

    def with_gaps(self) -> tuple[list[list[int]], list[list[float]]]:
        """Run once more; return the answers and, for each token, the best logprob minus the second best.

        This needs a separate run: with every token SGLang sends all logprobs again, which slows its HTTP process.
        """
        more = {"return_logprob": True, "top_logprobs_num": 2}
        rows = send_together(self._server.url, self._prompts, self._new, seconds=self._seconds, more=more)
        best = [row.meta["output_top_logprobs"] for row in rows]
        return [row.ids for row in rows], [[one[0][0] - one[1][0] for one in tokens] for tokens in best]

    async def _seconds_until_replaced(self, killed: int, seconds: float = 30) -> float | None:
        """Return the seconds until the server's log says that another worker serves; None if none does."""
        begun = time.monotonic()
        while time.monotonic() < begun + seconds:
            worker, log = worker_of(self._server.pid), self._server.log.read_text(errors="replace")
            if worker and worker.pid != killed and f"CPU worker {worker.pid} serves" in log:
                return round(time.monotonic() - begun, 1)
            await asyncio.sleep(0.1)  # no event to wait for: another program starts
        return None


def kill_worker_under_load(load: Load, new_tokens: int, kills: int = 1, tie: float = 0.0) -> dict[str, Any]:
    """Run undisturbed once, then ``kills`` pairs: undisturbed (the control), and with a kill at a third of the tokens.

    An answer may differ from the first run's where the logprobs of its two best tokens were within ``tie``.
    """
    load.prime()
    reference, undisturbed = load.run("undisturbed")
    found: dict[str, Any] = {"undisturbed": undisturbed, "control": [], "killed": []}
    for _ in range(kills):
        for name, kill_after in (("control", 0), ("killed", max(1, new_tokens // 3))):
            ids, figures = load.run(name, kill_after)
            differences = first_differences(reference, ids)
            figures |= {"equal_answers": differences.count(None), "first_differences": differences}
            found[name].append(figures)
    runs = [undisturbed, *found["control"], *found["killed"]]
    everybody = all(run["finished"] == len(reference) for run in runs)
    replaced = all(run["new_worker_after_s"] is not None for run in found["killed"])
    places = places_of(runs)
    compared = tell_apart(places, reference, *load.with_gaps(), tie=tie) if places else {"ties": [], "others": []}
    return found | {"compared": compared, "passed": everybody and replaced and not compared["others"]}


def places_of(runs: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return sorted (answer, token) indices at which the answer of a run first differs from the first run's."""
    found = {
        (answer, token)
        for run in runs
        for answer, token in enumerate(run.get("first_differences", ()))
        if token is not None
    }
    return sorted(found)


def tell_apart(
    places: Sequence[tuple[int, int]],
    reference: Sequence[Sequence[int]],
    again: Sequence[Sequence[int]],
    gaps: Sequence[Sequence[float]],
    *,
    tie: float,
) -> dict[str, list[dict[str, Any]]]:
    """Divide ``places`` into ties, where the two best tokens were about equally likely, and others.

    ``again``, ``gaps``: answers of one more run of the same requests, and the differences between the logprobs of its
    two best tokens. A gap counts only if that answer equals the ``reference`` answer up to its place.
    """
    found: dict[str, list[dict[str, Any]]] = {"ties": [], "others": []}
    for answer, token in places:
        same = list(again[answer][:token]) == list(reference[answer][:token])
        gap = round(gaps[answer][token], 4) if same and token < len(gaps[answer]) else None
        kind = "ties" if gap is not None and gap <= tie else "others"
        found[kind].append({"answer": answer, "token": token, "gap": gap})
    return found
