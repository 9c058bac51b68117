"""Runs one of NVIDIA's generators in a process: ``python run_generator.py SCRIPT [its arguments]``.

Two packages that the scripts import are replaced. nltk's sentence splitter needs data from the network. transformers
imports torch, only to count tokens, and would run Python code from a model's directory.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+")


def sent_tokenize(text: str) -> list[str]:
    """Split ``text`` after a full stop, a question mark or an exclamation mark that is followed by white space."""
    return [sentence for sentence in _BETWEEN_SENTENCES.split(text) if sentence]


class AutoTokenizer:
    """Counts tokens. The scripts use nothing else of transformers."""

    def __init__(self, directory: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def from_pretrained(cls, directory: str, **_options: Any) -> AutoTokenizer:
        return cls(directory)

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def replace(name: str, **contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def main() -> None:
    script = sys.argv[1]
    replace("nltk")
    replace("nltk.tokenize", sent_tokenize=sent_tokenize)
    replace("transformers", AutoTokenizer=AutoTokenizer)
    sys.argv = sys.argv[1:]
    # Scripts import files of their own folder, and must not find files of this one.
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
