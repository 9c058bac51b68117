"""Prompts of ``sglang-hybrid eval``: their lengths, depths, hidden answers and questions."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.haystack import Haystack
from sglang_hybrid.commands.eval.lines import lines_prompts
from sglang_hybrid.commands.eval.longbench import Record, longbench_prompts, read_records, without_middle
from sglang_hybrid.commands.eval.multi_needle import multi_needle_prompts
from sglang_hybrid.commands.eval.needle import needle_prompts
from sglang_hybrid.commands.eval.text import builtin_text, read_text, windows
from sglang_hybrid.commands.eval.words import CITIES

SENTENCE = "The quick brown fox jumps over the lazy dog, says number {}."
STORY = " ".join(SENTENCE.format(n) for n in range(200))
LONGEST_SENTENCE = len(" " + SENTENCE.format(199))
BEGIN = 0


class Characters:
    """Tokenizer with one token per character. With ``begins``, special token 0 begins a text."""

    def __init__(self, begins: bool = False) -> None:
        self._begin = [BEGIN] if begins else []

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        return (self._begin if add_special_tokens else []) + [ord(character) for character in text]


class Words:
    """Tokenizer with one token per word or punctuation mark, with the white space before it."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self.words: list[str] = []

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        ids = []
        for word in re.findall(r"\s*(?:\w+|[^\w\s])|\s+", text):
            if word not in self._ids:
                self._ids[word] = len(self.words)
                self.words.append(word)
            ids.append(self._ids[word])
        return ids


def decoded(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


CHARACTERS = Characters()
HAYSTACK = Haystack(CHARACTERS, STORY)


# -- needle ------------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(length=st.integers(300, 9000), depth=st.floats(0, 1), seed=st.integers(0, 5))
def test_a_needle_prompt_has_its_length_and_its_needle_lies_at_its_depth(length: int, depth: float, seed: int) -> None:
    (prompt,) = needle_prompts(HAYSTACK, [length], [depth], seed=seed)
    text, (number,) = decoded(prompt.ids), prompt.answers
    assert (len(prompt.ids), prompt.length, prompt.depth) == (length, length, depth)
    needle = re.search(rf" The special magic number of (\w+) is {number}\.", text)
    assert needle and text.count(number) == 1
    question = text.index("\n\nQuestion: ")
    assert text.endswith(f"Answer: The special magic number of {needle[1]} is")
    around = question - len(needle[0])  # the haystack without the needle
    assert abs(needle.start() - depth * around) <= LONGEST_SENTENCE
    before = text[: needle.start()]
    assert not before or before.endswith("."), "not between two sentences"


@pytest.mark.parametrize("tokenizer", [CHARACTERS, Words()])
def test_a_grid_has_every_cell_as_often_as_asked_for(tokenizer: Any) -> None:
    prompts = needle_prompts(Haystack(tokenizer, STORY), [400, 800], [0, 0.5, 1], repeats=3)
    cells = [(prompt.length, prompt.depth) for prompt in prompts]
    assert {cell: cells.count(cell) for cell in cells} == {
        (length, depth): 3 for length in (400, 800) for depth in (0.0, 0.5, 1.0)
    }
    assert len({prompt.ids for prompt in prompts}) == len(prompts), "repeats are different prompts"
    assert all(len(prompt.ids) == prompt.length for prompt in prompts)


def test_a_cell_does_not_depend_on_the_rest_of_the_grid() -> None:
    alone = needle_prompts(HAYSTACK, [800], [0.5], repeats=2, seed=3)
    grid = needle_prompts(Haystack(CHARACTERS, STORY), [400, 800], [0, 0.5, 1], repeats=4, seed=3)
    assert [prompt for prompt in grid if (prompt.length, prompt.depth) == (800, 0.5)][:2] == alone
    assert needle_prompts(HAYSTACK, [800], [0.5], repeats=2, seed=4) != alone


def test_a_short_haystack_is_repeated_and_a_text_without_sentences_is_split() -> None:
    for text in ("Only this.", "word " * 4000, "x" * 5000, "句子。" * 50):
        for depth in (0.0, 0.5, 1.0):
            (prompt,) = needle_prompts(Haystack(CHARACTERS, text), [3000], [depth])
            assert len(prompt.ids) == 3000
            assert abs(decoded(prompt.ids).index(" The special") - depth * 2800) < 550


def test_a_prompt_begins_with_what_the_model_expects_before_a_text() -> None:
    tokenizer = Characters(begins=True)
    haystack = Haystack(tokenizer, STORY)
    records = [Record("context " * 100, "what?", ["this"], "hotpotqa")]
    for prompt in (
        *needle_prompts(haystack, [500]), *multi_needle_prompts(haystack, [900]), *lines_prompts(haystack, [900]),
        *longbench_prompts(tokenizer, records, 300),
    ):  # fmt: skip
        assert prompt.ids[0] == BEGIN and prompt.ids.count(BEGIN) == 1
        assert len(prompt.ids) <= prompt.length


def test_the_answer_fits_into_the_new_tokens() -> None:
    for prompt in (*needle_prompts(HAYSTACK, [500]), *lines_prompts(HAYSTACK, [900])):
        assert len(" <48213>") < prompt.new_tokens <= 16


def test_what_cannot_be_asked_is_refused_with_the_least_length() -> None:
    for ask in (
        lambda length: needle_prompts(HAYSTACK, [length], [0.5]),
        lambda length: multi_needle_prompts(HAYSTACK, [length]),
        lambda length: lines_prompts(HAYSTACK, [length]),
    ):
        with pytest.raises(InputError, match=r"at least \d+ tokens, not 50: raise the length"):
            ask(50)
    with pytest.raises(InputError, match=r"depth 1\.5"):
        needle_prompts(HAYSTACK, [500], [1.5])
    with pytest.raises(InputError, match="haystack is empty"):
        Haystack(CHARACTERS, " \n")
    with pytest.raises(InputError, match="nearly all numbers"):
        needle_prompts(Haystack(CHARACTERS, " ".join(map(str, range(10_000, 100_000)))), [500], [0.5])


# -- several needles ---------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(length=st.integers(900, 6000), count=st.integers(1, 6), seed=st.integers(0, 5))
def test_prompts_of_a_haystack_differ_only_in_their_question(length: int, count: int, seed: int) -> None:
    prompts = multi_needle_prompts(HAYSTACK, [length], needles=count, seed=seed)
    texts = [decoded(prompt.ids) for prompt in prompts]
    assert len(prompts) == count == len({prompt.answers for prompt in prompts})
    assert len({text.partition("\n\nQuestion: ")[0] for text in texts}) == 1
    assert all(length - 40 <= len(prompt.ids) <= length for prompt in prompts)
    places = [texts[0].index(f" is {prompt.answers[0]}.") for prompt in prompts]
    assert places == sorted(places)
    for prompt, text in zip(prompts, texts, strict=True):
        asked = text[text.rindex("The special magic number of ") :]
        assert f"{asked} {prompt.answers[0]}." in text


def test_needles_are_spread_over_the_haystack() -> None:
    prompts = multi_needle_prompts(HAYSTACK, [8000], needles=4, repeats=2)
    assert [prompt.depth for prompt in prompts] == [0.125, 0.375, 0.625, 0.875] * 2
    for prompt in prompts:
        assert prompt.depth == pytest.approx(decoded(prompt.ids).index(prompt.answers[0]) / 8000, abs=0.04)
    with pytest.raises(InputError, match="41 needles"):
        multi_needle_prompts(HAYSTACK, [8000], needles=41)


# -- lines -------------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(length=st.integers(1000, 8000), repeats=st.integers(1, 3), seed=st.integers(0, 5), count=st.integers(1, 12))
def test_lines_are_spread_over_the_text_and_one_of_them_is_asked_for(
    length: int, repeats: int, seed: int, count: int
) -> None:
    prompts = lines_prompts(HAYSTACK, [length], repeats, seed, count)
    depths = [prompt.depth for prompt in prompts if prompt.depth is not None]
    assert depths == sorted(depths) and len(depths) == len(prompts) == repeats
    for prompt in prompts:
        text = decoded(prompt.ids)
        assert length - 40 <= len(text) <= length
        body, _, question = text.partition("\n\nQuestion: ")
        lines = dict(re.findall(r"\nThe special magic number of (\w+) is (\d{5})\.\n", body))
        assert len(lines) == count
        key = question.rpartition("The special magic number of ")[2].removesuffix(" is")
        assert (lines[key],) == prompt.answers and list(lines.values()).count(lines[key]) == 1


def test_there_cannot_be_more_lines_than_cities() -> None:
    with pytest.raises(InputError, match="41 lines"):
        lines_prompts(HAYSTACK, [8000], lines=41)


def test_no_word_is_listed_twice() -> None:
    assert len(set(CITIES)) == len(CITIES)


# -- text --------------------------------------------------------------------------------------------------------------


@given(tokens=st.integers(1, 3000), count=st.integers(1, 9), prompt=st.integers(1, 300), decode=st.integers(1, 60))
def test_windows_are_spread_evenly_or_refused(tokens: int, count: int, prompt: int, decode: int) -> None:
    ids = range(tokens)
    try:
        found = windows(ids, count, prompt, decode)
    except InputError as error:
        assert tokens * count // (count + 1) + prompt + decode > tokens
        assert f"{tokens} tokens" in str(error)
        return
    assert [window.place for window in found] == [tokens * (n + 1) // (count + 1) for n in range(count)]
    for window in found:
        assert window.ids + window.following == tuple(range(window.place, window.place + prompt + decode))
        assert len(window.following) == decode
    assert all(abs((b.place - a.place) - tokens / (count + 1)) <= 1 for a, b in pairwise(found))


def test_without_files_the_text_is_pythons_own_and_always_the_same() -> None:
    assert read_text() == builtin_text()
    assert len(builtin_text()) > 300_000 and 'The "assert" statement' in builtin_text()[:2000]


def test_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Eins\n\nÄpfel.")
    (tmp_path / "b.jsonl").write_text(line(context="Two.") + line(context="Three."))
    assert read_text([tmp_path / "a.md", tmp_path / "b.jsonl"]) == "# Eins\n\nÄpfel.\n\nTwo.\n\nThree."


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Äpfel".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("\n")
    for name, why in (("latin.txt", "no UTF-8"), ("empty.txt", "is empty"), ("none.txt", "No such file")):
        with pytest.raises(InputError, match=f"{name} .*{why}"):
            read_text([tmp_path / name])


# -- LongBench ---------------------------------------------------------------------------------------------------------


def line(**changes: Any) -> str:
    record = {"context": "Once.", "input": "When?", "answers": ["once"], "dataset": "hotpotqa", "length": 1, "_id": "7"}
    return json.dumps({**record, **changes}) + "\n"


def test_records_become_prompts_with_the_question_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text(line(context="Not {input} but {this}.") + "\n" + line(dataset="trec_e"))
    question, examples = longbench_prompts(CHARACTERS, read_records(tmp_path / "all.jsonl"), 1000)
    assert decoded(question.ids) == "Not {input} but {this}.\n\nQuestion: When?\nAnswer:"
    assert (question.task, question.answers, question.depth, question.new_tokens) == (
        "longbench:hotpotqa", ("once",), None, 32,
    )  # fmt: skip
    assert decoded(examples.ids) == "Once.\nWhen?"
    assert question.length == len(question.ids)


@given(tokens=st.integers(0, 50), most=st.integers(2, 50))
def test_of_a_long_prompt_the_middle_is_left_out(tokens: int, most: int) -> None:
    ids = tuple(range(tokens))
    kept = without_middle(ids, most)
    assert len(kept) == min(tokens, most)
    assert sum(b - a != 1 for a, b in pairwise(kept)) == (tokens > most)
    assert not kept or (kept[0], kept[-1]) == (0, tokens - 1)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "no record of LongBench: .*truncated"),
        (line(answers="once"), r"Expected `array`, got `str` - at `\$.answers`"),
        ('{"context": "a", "input": "b", "answers": ["c"]}\n', "missing required field `dataset`"),
        (line(answers=[]), "at least one answer"),
        (line(answers=["a", " "]), "at least one answer"),
        (line(context=""), "`context` is empty"),
        (line(dataset=""), "`dataset` is empty"),
        ("[]", "Expected `object`"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, bad: str, why: str) -> None:
    (tmp_path / "bad.jsonl").write_text(line() + "\n" + bad)
    with pytest.raises(InputError, match=rf"bad\.jsonl, line 3: .*{why}"):
        read_records(tmp_path / "bad.jsonl")


def test_a_file_without_records_and_a_maximum_of_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="no records"):
        read_records(tmp_path / "empty.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="maximum length of 1"):
        longbench_prompts(CHARACTERS, [Record("a", "b", ["c"], "d")], 1)
