"""Runs experiments one after another. Cached results are not measured again; a failure does not stop the others."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from sglang_hybrid.commands.report.content import Note, Section
from sglang_hybrid.commands.report.context import Context
from sglang_hybrid.commands.report.experiments.base import ORDER, Experiment, Shown
from sglang_hybrid.commands.report.machine import describe, load_average
from sglang_hybrid.commands.report.session.client import MeasurementError


class Watcher(Protocol):
    """Receiver of a report's progress; ``console.ReportProgress`` implements this protocol."""

    def begins(self, name: str) -> None: ...

    def progress(self, text: str, part: float) -> None: ...

    def ends(self, name: str, status: str, seconds: float) -> None: ...


def run_all(
    experiments: Sequence[Experiment], context: Context, watcher: Watcher, command: Sequence[str]
) -> list[Section]:
    """Run all experiments and return their sections in the order of ``experiments``.

    Experiments run in the order of ``ORDER``, so that those with the same session follow each other. ``command`` is
    the command line without --only.
    """
    context.progress = watcher.progress
    sections: dict[str, Section] = {}
    try:
        for experiment in sorted(experiments, key=lambda one: ORDER.index(one.uses)):
            watcher.begins(experiment.name)
            begin = time.monotonic()
            sections[experiment.name] = section = run_one(experiment, context, command)
            watcher.ends(experiment.name, section.status, time.monotonic() - begin)
    finally:
        context.close()
    return [sections[experiment.name] for experiment in experiments]


def run_one(experiment: Experiment, context: Context, command: Sequence[str]) -> Section:
    """Run one experiment and return its section: measured, skipped or failed.

    KeyboardInterrupt is not caught: finished results are in the cache.
    """
    facts: dict[str, Any] = {
        "name": experiment.name, "title": experiment.title, "paper": experiment.paper, "question": experiment.question,
        "command": shlex.join([*command, "--only", experiment.name]),
    }  # fmt: skip
    if why := experiment.missing(context):
        return Section(**facts, status="skipped", elements=(Note(f"Skipped: {why}.", "warning"),))
    try:
        document = _result(experiment, context)
        shown = experiment.draw(document["result"])
    except MeasurementError as error:
        return Section(**facts, status="failed", elements=(Note(str(error)),))
    except Exception as error:  # a report takes long: one failure must not cost the other results
        return Section(**facts, status="failed", elements=(Note(f"{type(error).__name__}: {error}"),))
    return Section(
        **facts,
        status="arithmetic" if experiment.by_arithmetic else "measured",
        elements=_with_load(shown, document) if experiment.uses == "speed" else shown.elements,
        settings=shown.settings,
        origin=document["origin"],
        seconds=None if experiment.by_arithmetic else document["seconds"],
    )


def _result(experiment: Experiment, context: Context) -> dict[str, Any]:
    size = asdict(context.size)
    key = context.key(
        experiment=experiment.name, numbers={name: size[name] for name in experiment.numbers},
        codebooks=[str(path) for path in context.codebooks.values()],
    )  # fmt: skip
    document = context.cache.get(experiment.name, key)
    if document is None:
        begin, before = time.monotonic(), load_average()
        result = experiment.run(context)
        origin = {**describe(), "load_average": [before, load_average()]}
        seconds = round(time.monotonic() - begin, 1)
        document = {"experiment": experiment.name, "origin": origin, "seconds": seconds, "result": result}
        context.cache.put(experiment.name, key, document)
        document = context.cache.get(experiment.name, key) or document  # a later report would draw from the same file
    return document


def _with_load(shown: Shown, document: dict[str, Any]) -> tuple[Any, ...]:
    """Return the elements, with a warning if other programs used the cores while speed was measured."""
    measured = [document["origin"], *document["result"].get("speeds", [])]
    load = max(value for one in measured for value in one.get("load_average") or [0])
    cores = document["origin"]["machine"]["cores"]
    if load <= cores + 1:
        return shown.elements
    busy = f"Other programs ran beside: load average {load} on {cores} cores. Times say little."
    return (*shown.elements, Note(busy, "warning"))
