"""The prompts of RULER that a command line asks for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sglang_hybrid.commands.eval.errors import InputError

SAMPLES = 20
SEED = 42  # NVIDIA's
_LENGTH = re.compile(r"([1-9][0-9]{0,8})(k?)", re.IGNORECASE)
_LEAST = 1024


@dataclass(frozen=True)
class Request:
    lengths: tuple[int, ...]  # tokens, including the answer; empty: all lengths of a file
    tasks: tuple[str, ...]  # empty: all
    samples: int | None  # prompts of each task and length; None: the default, or all prompts of a file
    seed: int
    source: Path | None  # a file of prompts that replaces the generators


def request_of(options: argparse.Namespace) -> Request | None:
    """Return the request, None if the command line does not ask for RULER. Raise InputError for unusable flags."""
    source: Path | None = options.ruler_prompts
    if options.ruler is None and source is None:
        for flag in ("ruler_make", "ruler_tasks", "samples", "ruler_seed"):
            if getattr(options, flag) is not None:
                raise InputError(f"--{flag.replace('_', '-')} is of RULER: name lengths, as in --ruler 8k,32k")
        return None
    if source is not None and options.ruler_make is not None:
        raise InputError("--ruler-prompts reads a file of prompts and --ruler-make writes one: drop one of them")
    if source is not None and options.ruler_seed is not None:
        raise InputError("--ruler-seed makes prompts, and those of --ruler-prompts are made already: drop one of them")
    if options.samples is not None and options.samples < 1:
        raise InputError(f"--samples {options.samples}: there must be at least 1 prompt a task")
    return Request(
        lengths=tuple(dict.fromkeys(map(_length, _split([options.ruler or ""])))),
        tasks=tuple(dict.fromkeys(_split(options.ruler_tasks or ()))),
        samples=options.samples,
        seed=SEED if options.ruler_seed is None else options.ruler_seed,
        source=source,
    )


def check_names(request: Request, known: Iterable[str], where: str) -> None:
    """Raise InputError for a task that is not in ``known``. ``where``: the source of these names, for the message."""
    names = list(known)
    for task in request.tasks:
        if task not in names:
            raise InputError(f"--ruler-tasks {task}: {where} has {', '.join(names)}")


def _split(texts: Iterable[str]) -> list[str]:
    return [part for text in texts for part in text.replace(",", " ").split()]


def _length(text: str) -> int:
    match = _LENGTH.fullmatch(text)
    length = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if length < _LEAST:
        raise InputError(f"--ruler {text}: lengths are tokens from {_LEAST} on, such as 8k,16k or 32000")
    return length
