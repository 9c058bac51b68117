"""``sglang-hybrid eval --url``: servers that answer, wait, refuse and die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from eval_doubles import Reply, serving, write_tokenizer

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.main import main
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.ruler.prompts_file import Header, write_prompts
from sglang_hybrid.commands.eval.servers.asking import ask_all
from sglang_hybrid.commands.eval.servers.server import Server, servers_of


def right(asked: dict[str, Any]) -> Reply:
    """Answer a prompt correctly: the expected answer is the number of its first token."""
    return 200, {"text": f"it is {asked['input_ids'][0]}", "output_ids": [1], "meta_info": {}}


def wrong(_asked: dict[str, Any]) -> Reply:
    return 200, {"text": "no"}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Return a file of six prompts of two tasks."""
    made = [
        RetrievalPrompt(f"ruler:{task}", (n, 7), (str(n),), 4096, None, 30, "string_match_all")
        for task, numbers in (("vt", (100, 101, 102)), ("fwe", (103, 104, 105)))
        for n in numbers
    ]
    return write_prompts(tmp_path / "prompts.jsonl.gz", Header("any", "any", 42), made)


def evaluate(prompts: Path, *more: str) -> tuple[int, dict[str, Any]]:
    out = prompts.parent / "out"
    status = main(["--ruler-prompts", str(prompts), "--out", str(out), *more])
    file = out / "eval.json"
    return status, json.loads(file.read_text()) if file.exists() else {}


def test_servers_are_compared_with_stock_on_the_same_prompts(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(right, version="0.5.23", api_key="secret") as stock, serving(wrong) as ours:
        status, written = evaluate(prompts, "--url", f"small={ours.url}", "--stock-url", stock.url)
    assert status == 0 and written["baseline"] == "stock"
    first, second = written["runs"]
    assert first["settings"] == {"url": stock.url, "version": "0.5.23"}
    assert [task["task"] for task in second["tasks"]] == ["ruler:vt", "ruler:fwe", "ruler"]
    assert [task["score"] for task in first["tasks"]] == [1, 1, 1]
    assert second["difference_from_baseline"]["tasks"]["ruler"] == {"mean": -1, "low": -1, "high": -1}
    assert second["answers"][0] == {
        "task": "ruler:vt", "length": 4096, "depth": None, "metric": "string_match_all", "expected": ["100"],
        "text": "no", "score": 0,
    }  # fmt: skip
    assert "ruler (mean of 2 tasks, 6 prompts)" in capsys.readouterr().out
    assert written["origin"]["command"].startswith("sglang-hybrid eval --ruler-prompts")


def test_prompts_are_sent_as_tokens_and_decoded_greedily(prompts: Path) -> None:
    with serving(right) as server:
        assert evaluate(prompts, "--url", server.url)[0] == 0
    assert sorted(asked["input_ids"][0] for asked in server.asked) == list(range(100, 106))
    assert server.asked[0]["sampling_params"] == {"temperature": 0, "max_new_tokens": 30, "ignore_eos": False}


def test_as_many_prompts_are_sent_at_a_time_as_asked_for(prompts: Path) -> None:
    together = threading.Barrier(3)

    def when_all_are_there(asked: dict[str, Any]) -> Reply:
        together.wait(10)
        return right(asked)

    with serving(when_all_are_there) as server:
        assert evaluate(prompts, "--url", server.url, "--concurrency", "3")[0] == 0
    assert server.most_at_once == 3 and len(server.asked) == 6


def test_answers_before_a_servers_death_are_kept_and_compared(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = count()

    def dies(asked: dict[str, Any]) -> Reply:
        return right(asked) if next(numbers) < 4 else None

    with serving(right) as stock, serving(dies) as ours:
        more = ("--url", f"ours={ours.url}", "--stock-url", stock.url, "--concurrency", "1")
        status, written = evaluate(prompts, *more)
    assert status == 1
    first, second = written["runs"]
    assert (len(first["answers"]), len(second["answers"])) == (6, 4)
    assert [len(task["scores"]) for task in first["tasks"]] == [3, 1, 4] == [len(t["scores"]) for t in second["tasks"]]
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"sglang-hybrid eval: ours ({ours.url}) is gone: ")
    assert said.endswith("; 4 of 6 answers of ours are kept")
    assert len(ours.asked) == 5, "a server that is gone is not asked again"


def test_a_refusal_is_told_in_the_servers_words(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda _asked: (400, {"error": {"message": "too\n long"}})) as server:
        status, written = evaluate(prompts, "--url", server.url, "--concurrency", "1")
    assert (status, written) == (1, {})
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{server.url} refused a prompt of 2 tokens with status 400: too long; 0 of 6 answers" in said


def test_a_server_without_a_tokenizer_answers_in_tokens(prompts: Path, tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")

    def tokens(asked: dict[str, Any]) -> Reply:
        from sglang_hybrid.commands.eval.model_tokenizer import ModelTokenizer

        text = f" it is {asked['input_ids'][0]}</u>"
        return 200, {"output_ids": ModelTokenizer(model).encode(text, add_special_tokens=False), "meta_info": {}}

    with serving(tokens, tokenizer_path=str(model)) as server:
        status, written = evaluate(prompts, "--url", server.url)
    (run,) = written["runs"]
    assert status == 0 and run["answers"][0]["text"] == " it is 100"


def test_own_prompts_are_made_with_the_tokenizer_that_the_server_names(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    given = ["--tasks", "needle", "--lengths", "2000", "--depths", "0.5", "--out", str(tmp_path / "out")]
    with serving(right, model_path=str(model)) as server:
        assert main(["--url", server.url, *given]) == 0
    assert len(server.asked[0]["input_ids"]) == 2000


def test_a_tokenizer_that_is_nowhere_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with serving(right, model_path="org/model") as server:
        assert main(["--url", server.url, "--tasks", "needle"]) == 2
        assert "name its directory with --model-path" in capsys.readouterr().err
        assert main(["--url", server.url, "--tasks", "needle", "--model-path", str(tmp_path)]) == 2
        assert "has no tokenizer.json" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told_before_anything_is_done(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(right) as server:
        gone = server.url
    assert evaluate(prompts, "--url", f"ours={gone}") == (2, {})
    said = capsys.readouterr().err
    assert said.startswith(f"sglang-hybrid eval: ours ({gone}) cannot be asked: ") and said.count("\n") == 1


def test_ctrl_c_keeps_what_was_answered() -> None:
    asked = [RetrievalPrompt("needle", (n,), (str(n),), 10, None, 5) for n in range(3)]
    numbers, third, over = count(), threading.Event(), threading.Event()

    def waits_for_the_end(request: dict[str, Any]) -> Reply:
        if next(numbers) == 2:  # asked behind the second reply, which nobody has looked at
            third.set()
            over.wait(30)
        return right(request)

    def interrupt(_prompt: RetrievalPrompt) -> None:
        assert third.wait(30)
        raise KeyboardInterrupt

    with serving(waits_for_the_end) as server:
        (outcome,) = ask_all([Server("a", server.url)], asked, 1, interrupt)
        over.set()
    assert outcome.error == "interrupted" and list(outcome.replies) == [0, 1]


def test_a_program_that_is_told_to_end_writes_what_was_answered(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = count()

    def terminates(asked: dict[str, Any]) -> Reply:
        if next(numbers) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)  # no further answer meanwhile
        return right(asked)

    before = signal.getsignal(signal.SIGTERM)
    with serving(terminates) as server:
        status, written = evaluate(prompts, "--url", f"ours={server.url}", "--concurrency", "1")
    assert status == 1 and len(written["runs"][0]["answers"]) == 4
    assert capsys.readouterr().err.endswith("interrupted; 4 of 6 answers of ours are kept\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_servers_have_the_names_that_they_are_given_or_their_addresses() -> None:
    assert servers_of(["http://a:1/", "b=https://c/?x=y"], "http://d") == [
        Server("stock", "http://d"), Server("a:1", "http://a:1"), Server("b", "https://c/?x=y"),
    ]  # fmt: skip
    with pytest.raises(InputError, match="two servers are named a"):
        servers_of(["a=http://b", "a=http://c"], None)
    for bad in ("a", "a=b", "ftp://a", "http://"):
        with pytest.raises(InputError, match="an address such as http://127"):
            servers_of([bad], None)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["sglang"] = sys.modules["transformers"] = None
from sglang_hybrid.commands.eval.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_servers_are_asked_without_torch_sglang_and_transformers(prompts: Path) -> None:
    with serving(right) as server:
        given = ["--ruler-prompts", str(prompts), "--url", server.url, "--out", str(prompts.parent / "out")]
        subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *given], check=True, capture_output=True)
    assert len(server.asked) == 6
