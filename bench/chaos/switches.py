"""Switches of a ``bench.chaos.server``, passed as a JSON list in the environment variable that SWITCHES names."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence

SWITCHES = "SGLANG_HYBRID_CHAOS"
SAME_BITS = "same-bits"  # see same_bits.py
SPOIL_FREED_PAGES = "spoil-freed-pages"  # see freed_pages.py
TELL_STACKS = signal.SIGUSR2  # makes the scheduler process write the stacks of its threads into its log
ROWS_NOT_RESET = "bug-rows-not-reset"  # a bug on purpose, see inside.py


def in_environment(switches: Sequence[str]) -> dict[str, str]:
    return {SWITCHES: json.dumps(list(switches))}


def switched_on() -> list[str]:
    return list(json.loads(os.environ.get(SWITCHES, "[]")))
