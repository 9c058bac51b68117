"""The one exception of this package; its text is meant for the person at the terminal."""


class SizeError(ValueError):
    """This cannot be sized; the message says what is possible."""
