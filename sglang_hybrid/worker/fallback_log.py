"""Log of misses that were not served by the worker, limited so that it does not flood the server's log."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("sglang.srt.hybrid")

_LOG_SECONDS = 10.0

_WHY = {
    "no-worker": "there was no worker",
    "late": "the worker did not answer in time",
    "behind": "the worker had not caught up and got nothing new",
    "damaged": "the worker's answer was refused or did not fit the request",
    "overwritten": "the policy posted two more layers before it collected this one, and the mailbox holds two",
}


class FallbackLog:
    """Writes a line for the first misses, then at most one line every ten seconds, which sums up."""

    def __init__(self, did: str = "were computed in the server process") -> None:
        """Create a log. ``did`` says in words what was done about the misses."""
        self._did = did
        self._rows = dict.fromkeys(_WHY, 0)
        self._told = -_LOG_SECONDS

    def note(self, why: str, rows: int) -> None:
        self._rows[why] += rows
        now = time.monotonic()
        if now - self._told < _LOG_SECONDS:
            return
        self._told = now
        reasons = ", ".join(f"{count} because {_WHY[why]}" for why, count in self._rows.items() if count)
        logger.warning("misses of %d rows %s: %s", sum(self._rows.values()), self._did, reasons)
        self._rows = dict.fromkeys(_WHY, 0)
