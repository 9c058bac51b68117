"""What a person can put right."""

from __future__ import annotations


class InputError(ValueError):
    """A text, a record or a length that cannot be evaluated. The message says what to change."""
