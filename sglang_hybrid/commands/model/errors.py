"""The one exception of this package. Its text is meant for the person at the terminal."""


class DefaultModelError(RuntimeError):
    """The model cannot be provided; the message says what to do about it."""
