"""How an evaluation ends other than well: by a mistake that the user can correct, or interrupted."""

from __future__ import annotations

INTERRUPTED = 130  # exit status, as shells have it


class InputError(ValueError):
    """A flag, a text, a record or a length that cannot be evaluated. The message says what to change."""
