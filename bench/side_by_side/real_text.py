"""Prompts for a real model: different pieces of a long text, the sources of Python's standard library."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

_MOST_BYTES = 200_000  # longer files are not read: they are generated tables of data


class RealText:
    """Windows of tokens that do not overlap, cut from files in an order that the seed decides."""

    def __init__(self, tokenizer: Path, seed: int, files: list[Path] | None = None) -> None:
        """``tokenizer``: path of a tokenizer.json. ``files``: the text; by default Python's standard library."""
        self._tokenizer_file, self._seed, self._files = tokenizer, seed, files
        self._tokens: list[int] = []
        self._taken = 0

    @cached_property
    def _texts(self) -> Iterator[str]:
        files = self._files
        if files is None:
            found = Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
            files = sorted(path for path in found if path.stat().st_size <= _MOST_BYTES)
        random.Random(self._seed).shuffle(files := list(files))
        return (path.read_text(encoding="utf-8", errors="replace") for path in files)

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` tokens. Raise ValueError if the text has no more."""
        from tokenizers import Tokenizer  # type: ignore[import-untyped, unused-ignore]

        if not hasattr(self, "_tokenizer"):
            self._tokenizer = Tokenizer.from_file(str(self._tokenizer_file))
        while len(self._tokens) - self._taken < count:
            if (text := next(self._texts, None)) is None:
                raise ValueError(f"the text has {len(self._tokens)} tokens: give more files, or fewer or shorter rows")
            self._tokens += self._tokenizer.encode(text, add_special_tokens=False).ids
        self._taken += count
        return self._tokens[self._taken - count : self._taken]
