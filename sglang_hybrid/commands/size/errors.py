"""The exception of ``sglang-hybrid size``; its message is for the person at the terminal."""


class SizeError(ValueError):
    """The input cannot be sized; the message says what is possible."""
