"""The exception for mistakes that the user can correct."""

from __future__ import annotations


class InputError(ValueError):
    """A flag, a text, a record or a length that cannot be evaluated. The message says what to change."""
