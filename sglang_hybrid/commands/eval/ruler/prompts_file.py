"""Prompts of RULER as token ids in a compressed file: one JSON object per line, the first line is a header.

The file can be used on machines that have neither NVIDIA's package nor a network, and keeps two evaluations on the same
prompts.
"""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.ruler.scoring import PREFIX

FORMAT = 1
S = TypeVar("S", bound=msgspec.Struct)


class Header(msgspec.Struct, frozen=True):
    tokenizer: str  # fingerprint, see ModelTokenizer
    package: str  # name and version of the package that made the prompts
    seed: int
    format: int = FORMAT


class Line(msgspec.Struct, frozen=True):
    task: str
    length: int
    ids: list[int]
    answers: list[str]
    new_tokens: int
    metric: str


def write_prompts(path: Path, header: Header, prompts: Sequence[RetrievalPrompt]) -> Path:
    """Write the file completely or not at all: an interrupted write leaves the file as it was. Return ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode(header), *(msgspec.json.encode(_line(prompt)) for prompt in prompts)]
    # without a time stamp, so that equal prompts make equal files
    content = gzip.compress(b"\n".join(lines) + b"\n", mtime=0)
    # a temporary name that is unique: several processes may write the same prompts
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
    return path


def read_prompts(path: Path) -> tuple[Header, list[RetrievalPrompt]]:
    """Return the header and the prompts of a file. Raise InputError, with file and line, if it cannot be used."""
    try:
        lines = gzip.decompress(path.read_bytes()).splitlines()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is no complete file of prompts ({error}): make it anew with --ruler-make") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    header = _decoded(path, 1, lines[0] if lines else b"", Header)
    prompts = [_prompt(_decoded(path, number, line, Line)) for number, line in enumerate(lines[1:], 2)]
    if header.format != FORMAT:
        raise InputError(f"{path} has format {header.format}, this release reads {FORMAT}: make it anew")
    if not prompts:
        raise InputError(f"{path} has no prompts: make it anew with --ruler-make")
    return header, prompts


def _decoded(path: Path, number: int, line: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{path}, line {number}: not written by --ruler-make: {error}") from error


def _line(prompt: RetrievalPrompt) -> Line:
    return Line(
        prompt.task.removeprefix(PREFIX), prompt.length, list(prompt.ids), list(prompt.answers), prompt.new_tokens,
        prompt.metric,
    )  # fmt: skip


def _prompt(line: Line) -> RetrievalPrompt:
    return RetrievalPrompt(
        PREFIX + line.task, tuple(line.ids), tuple(line.answers), line.length, None, line.new_tokens, line.metric
    )
