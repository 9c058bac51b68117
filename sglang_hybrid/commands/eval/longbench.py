"""Reads LongBench records, or a user's records in the same format: one JSON object per line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.longbench_datasets import Dataset, dataset
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.tokenizer import Tokenizer, beginning, tokens

PREFIX = "longbench:"


class Record(msgspec.Struct, frozen=True):
    """One record. Further fields of the JSON object are ignored."""

    context: str
    input: str  # the question; empty if the dataset defines the question
    answers: list[str]
    dataset: str
    length: int | None = None  # of the context in words, as LongBench counts them


def read_records(path: Path) -> list[Record]:
    """Return the records of a file. Raise InputError, with file and line, for a file or record that cannot be used."""
    decoder = msgspec.json.Decoder(Record)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InputError(f"{path}, line {number}: no record of LongBench: {error}") from error
        if problem := _problem(record):
            raise InputError(f"{path}, line {number}: {problem}")
        records.append(record)
    if not records:
        raise InputError(f"{path} has no records: leave it out")
    return records


def _problem(record: Record) -> str:
    if not record.context.strip():
        return "`context` is empty"
    if not record.answers or not all(answer.strip() for answer in record.answers):
        return "`answers` must have at least one answer, and none that is empty"
    return "" if record.dataset.strip() else "`dataset` is empty"


def longbench_prompts(tokenizer: Tokenizer, records: Sequence[Record], max_length: int) -> list[RetrievalPrompt]:
    """Return one prompt per record, at most ``max_length`` tokens long. As in LongBench, the middle is left out."""
    return [_prompt(tokenizer, record, max_length) for record in records]


def _prompt(tokenizer: Tokenizer, record: Record, max_length: int) -> RetrievalPrompt:
    settings = dataset(record.dataset)
    begin = beginning(tokenizer)
    if max_length <= len(begin) + 1:
        raise InputError(f"a maximum length of {max_length} tokens leaves nothing of a prompt: raise it")
    ids = begin + without_middle(tokens(tokenizer, _text(settings, record)), max_length - len(begin))
    answers = tuple(record.answers)
    return RetrievalPrompt(PREFIX + record.dataset, ids, answers, len(ids), None, settings.new_tokens)


def _text(settings: Dataset, record: Record) -> str:
    # Not str.format, and not one replacement after the other: a context may contain braces, which would be filled in.
    before, _, after = settings.template.partition("{context}")
    return before + record.context + after.replace("{input}", record.input)


def without_middle(ids: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return at most ``most`` tokens, half from the beginning (instructions) and half from the end (the question)."""
    if len(ids) <= most:
        return ids
    head = most // 2
    return ids[:head] + ids[len(ids) - (most - head) :]
