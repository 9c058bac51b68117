"""Numbered steps on the console, one line each: what is done, then how long it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from installers import InstallError

_LINES_OF_OUTPUT = 40


@dataclass(frozen=True)
class Step:
    what: str
    do: Callable[[], str | None]  # returns a remark for the step's line
    hint: str  # what to try when it fails


def run_steps(steps: list[Step]) -> None:
    """Run the steps in order. A step that fails prints the end of its commands' output and ends the program."""
    begun = time.monotonic()
    for number, step in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {step.what} ... ", end="", flush=True)
        started = time.monotonic()
        try:
            remark = step.do()
        except InstallError as error:
            print("failed", flush=True)
            sys.exit(explain(step, error))
        print(f"{time.monotonic() - started:.0f} s{f' ({remark})' if remark else ''}", flush=True)
    print(f"ready after {time.monotonic() - begun:.0f} s", flush=True)


def explain(step: Step, error: InstallError) -> str:
    shown = error.output.strip().splitlines()[-_LINES_OF_OUTPUT:]
    return "\n".join([*shown, "", f"failed: {' '.join(error.command)}", f"try: {error.hint or step.hint}"])
