"""Parsing and formatting of bytes and tokens as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from sglang_hybrid.commands.size.errors import SizeError

GB = 10**9
_UNITS = {"MB": 10**6, "GB": GB, "TB": 10**12, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_BYTES = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([MGT]i?B)", re.IGNORECASE)
_TOKENS = re.compile(r"([1-9][0-9]{0,8})(k?)", re.IGNORECASE)


def bytes_of(text: str) -> int:
    match = _BYTES.fullmatch(text.strip())
    if match is None or Fraction(match[1]) == 0:
        raise SizeError(f"{text!r} is no size: write a number above 0 with its unit, such as 24GB, 80GiB or 1.5TB")
    return int(Fraction(match[1]) * _UNITS[match[2].upper()])


def tokens_of(text: str) -> int:
    """Parse a number of tokens; ``32k`` is 32,768. Raise SizeError for any other text."""
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise SizeError(f"{text!r} is no number of tokens: write a whole number above 0, such as 4000 or 32k")
    return int(match[1]) * (1024 if match[2] else 1)


def format_bytes(count: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", GB), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:,.4g} {unit}" if unit == "TB" else f"{count / size:,.1f} {unit}"
    return f"{count / 1000:,.1f} kB"
