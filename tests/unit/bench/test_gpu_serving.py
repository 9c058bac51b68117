"""bench/gpu_serving.py without a server: comparison of runs, reading of logs and of memory samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_serving
from bench.serving.alone import memory_verdict
from bench.serving.benchmark import figures
from bench.serving.killing import decode_rate, first_differences, longest_pause, places_of, served, tell_apart
from bench.serving.openai_api import text_of_stream
from bench.serving.tokenizer import has_chat_template, tokenizer_of
from bench.side_by_side.statistics import Arrivals
from bench.side_by_side.telling import log_tail


def test_first_differences_are_found_for_each_answer() -> None:
    assert first_differences([[1, 2, 3], [1, 2], [5]], [[1, 2, 3], [1, 7], [5]]) == [None, 1, None]
    assert first_differences([[1, 2]], [[1, 2, 3]]) == [2]  # the first answer is shorter


def test_places_where_any_run_left_the_first_one_are_found_once() -> None:
    runs: list[dict[str, Any]] = [{}, {"first_differences": [None, 4]}, {"first_differences": [2, 4]}]
    assert places_of(runs) == [(0, 2), (1, 4)]


def test_an_answer_may_differ_where_its_two_best_tokens_were_equally_likely() -> None:
    reference, again = [[1, 2, 3], [4, 5, 6], [7, 8]], [[1, 2, 9], [4, 0, 6], [7, 8]]
    gaps = [[3.0, 2.0, 0.01], [3.0, 0.01, 0.01], [3.0, 1.5]]
    found = tell_apart([(0, 2), (1, 2), (2, 1)], reference, again, gaps, tie=0.05)
    assert found["ties"] == [{"answer": 0, "token": 2, "gap": 0.01}]
    unlike = {"answer": 1, "token": 2, "gap": None}  # no gap: that run had differed from the first run earlier
    assert found["others"] == [unlike, {"answer": 2, "token": 1, "gap": 1.5}]


def test_the_rate_counts_the_time_in_which_all_rows_decode() -> None:
    rows = [Arrivals(times=[0.0, 10.0], tokens=[1, 101]), Arrivals(times=[5.0, 12.0], tokens=[1, 71])]
    assert decode_rate(rows) == pytest.approx((50 + 50) / 5)
    apart = [Arrivals(times=[0.0, 1.0], tokens=[1, 2]), Arrivals(times=[2.0, 3.0], tokens=[1, 2])]
    assert decode_rate(apart) is None


def test_pauses_can_be_counted_from_some_moment_on() -> None:
    rows = [Arrivals(times=[0.0, 3.0, 3.5], tokens=[1, 2, 3])]
    assert (longest_pause(rows), longest_pause(rows, since=3.2), longest_pause([Arrivals()])) == (3.0, 0.5, 0.0)


def test_rows_are_counted_by_who_served_their_misses() -> None:
    counted = {
        'sglang_hybrid_miss_rows_total{by="worker",rank="0"}': 40.0,
        'sglang_hybrid_miss_rows_total{by="worker",rank="1"}': 2.0,
        'sglang_hybrid_miss_rows_total{by="device-late",rank="0"}': 0.0,
        "sglang_hybrid_worker_up": 1.0,
    }
    assert served(counted) == {"worker": 42}


def test_a_stream_that_only_told_an_error_is_no_answer() -> None:
    said = {"completed": 3, "ttfts": [0.5, 0.0, 0.4], "generated_texts": ["a", "", "b"], "mean_ttft_ms": 300.123}
    assert figures(said) == {"answered": 2, "completed": 3, "mean_ttft_ms": 300.12}


def test_the_end_of_a_log_has_nothing_dull(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('server_args=ServerArgs(x)\n\nfirst\nINFO: "GET /health HTTP/1.1" 200 OK\nlast\n')
    assert log_tail(log) == ["first", "last"]
    assert log_tail(log, lines=1) == ["last"]


def point(gpu: int | None, tokens: int) -> dict[str, Any]:
    return {"held": {"gpu_mib": gpu and {"least": gpu, "most": gpu}, "tokens": {"least": 0, "most": tokens}}}


def test_gpu_memory_is_flat_while_host_pages_grow() -> None:
    verdict = memory_verdict([point(9000, 100), point(9100, 800), {"error": "no room"}])
    assert (verdict["gpu_stays_flat"], verdict["gpu_grew_by_mib"], verdict["host_pages_grow"]) == (True, 100, True)
    assert memory_verdict([point(9000, 100), point(12000, 800)])["gpu_stays_flat"] is False
    without = memory_verdict([point(None, 100), point(None, 100)])
    assert (without["gpu_stays_flat"], without["host_pages_grow"]) == (None, False)


def test_a_log_is_searched_for_leaks_and_retractions(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "server_args=ServerArgs(leak=1)\nCPU worker 12 serves\nRetract requests. #1\nmemory leak detected!\n"
    )
    found = gpu_serving.read_log(log)
    assert (found["leaks"], found["retractions"]) == (["memory leak detected!"], 1)
    assert found["of_the_worker"] == ["CPU worker 12 serves"]
    assert gpu_serving.read_log(tmp_path / "none")["leaks"]


def test_a_stream_says_what_its_events_say_together() -> None:
    events = ['data: {"choices": [{"text": "a b"}]}', "", 'data: {"choices": [{"text": " c"}, {"text": ""}]}', ": ping"]
    assert text_of_stream("\n".join([*events, 'data: {"choices": []}', "data: [DONE]", ""])) == "a b c"


def test_a_model_without_a_tokenizer_gets_one_word_for_every_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(tmp_path, tmp_path), local_files_only=True)
    assert tokenizer.vocab_size == 50
    ids = [0, 49, 7, 7]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids


def test_a_chat_template_is_found_in_either_place(tmp_path: Path) -> None:
    assert not has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "w1"}')
    assert not has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(tmp_path)
