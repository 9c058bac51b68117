"""bench/arrivals.py without servers: workloads, memory of each side, sustained rates, and rates that are left out."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from bench import arrivals
from bench.serving.benchmark import Asked, figures
from bench.serving.conversations import lengths, write_conversations
from bench.serving.tokenizer import tokenizer_of
from bench.serving.workloads import Workload
from bench.side_by_side.capacity import KVModel
from bench.synthetic_model import TINY, Character, write_model

KV = KVModel(layers=10, kv_heads=8, head_dim=128, itemsize=2)
RECORDED = Path(__file__).parent / "recorded" / "bench-serving.jsonl"


def point(rate: float, pause: float, answered: int = 8, ttft: float = 900.0) -> dict[str, Any]:
    told = {"configuration": "hybrid", "workload": "w", "rate": rate, "asked": 8, "answered": answered}
    return {**told, "p99_itl_ms": pause, "median_ttft_ms": ttft, "output_throughput": 1.0, "median_tpot_ms": 1.0}


def rates(points: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    found = arrivals.sustained(points, 100, 5)["hybrid"]["w"]
    return found["by_pauses"], found["by_pauses_and_first_token"]


def test_the_largest_rate_within_the_limits_is_sustained() -> None:
    assert rates([point(0.5, 20), point(1.0, 90, ttft=30_000), point(2.0, 300)]) == (1.0, 0.5)


def test_a_rate_with_lost_answers_or_an_error_is_not_sustained() -> None:
    failed = {"configuration": "hybrid", "workload": "w", "rate": 0.1, "error": "TimeoutError"}
    assert rates([point(0.5, 20, answered=7), failed]) == (None, None)


def test_workloads_are_tokens_in_and_out_and_rates() -> None:
    assert Workload.of("32k:500@1,0.5") == Workload("32k:500", (0.5, 1.0), 32768, 500)
    assert Workload.of("mix:16@4") == Workload("mix:16", (4.0,), scale=16.0)
    for wrong in ("32k:500", "32k@1", "mix@fast"):
        with pytest.raises(ValueError, match="write 32k:500"):
            Workload.of(wrong)


def test_a_wrong_workload_or_run_is_refused_with_what_is_possible(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in ((["--workloads", "32k"], "write 32k:500"), (["--runs", "fast"], "stock-fp8")):
        with pytest.raises(SystemExit):
            arrivals.parsed(flags)
        assert said in capsys.readouterr().err


def test_every_side_has_the_same_memory_for_its_cache() -> None:
    args = arrivals.parsed(["--runs", "stock,stock-fp8,hybrid", "--gpu-limit", "11"])
    stock, fp8, hybrid = args.configurations

    def tokens(flags: list[str]) -> int:
        return int(flags[flags.index("--max-total-tokens") + 1])

    plain, small = (tokens(arrivals.flags_of(args, Path("m"), Path("t"), KV, one)) for one in (stock, fp8))
    assert plain == 11 * 10**9 // KV.token_bytes and small // 2 == plain
    flags = arrivals.flags_of(args, Path("m"), Path("t"), KV, hybrid)
    assert "--max-total-tokens" not in flags and "host_memory=84.0GB" in flags
    assert flags[flags.index("--chunked-prefill-size") + 1] == "4096"


# -- conversations -----------------------------------------------------------------------------------------------------


def test_lengths_of_conversations_are_like_sharegpts() -> None:
    asked, answered = zip(*lengths(4000, 1.0, seed=0), strict=True)
    assert 120 < statistics.mean(asked) < 200 and 280 < statistics.mean(answered) < 400
    assert statistics.median(asked) < 0.7 * statistics.mean(asked)  # most lengths are short, some are long
    longer, same = zip(*lengths(4000, 16.0, seed=0), strict=True)
    assert statistics.mean(longer) == pytest.approx(16 * statistics.mean(asked), rel=0.01) and same == answered


def test_conversations_have_the_lengths_that_were_drawn(tmp_path: Path) -> None:
    from tokenizers import Tokenizer  # type: ignore[import-untyped, unused-ignore]

    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    tokenizer = tokenizer_of(tmp_path, tmp_path)
    made = json.loads(write_conversations(tmp_path / "c.json", tokenizer, 5).read_text())
    words = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    turns = [[turn["value"] for turn in one["conversations"]] for one in made]
    assert [tuple(len(words.encode(text).ids) for text in both) for both in turns] == lengths(5, 1.0, 1)


def test_a_data_set_is_taken_where_there_is_one(tmp_path: Path) -> None:
    asked = Workload.of("mix@4").asked(4.0, 10, 64, tmp_path, tmp_path, sharegpt=tmp_path / "real.json")
    assert asked == Asked(10, 0, 0, 64, 4.0, tmp_path / "real.json")
    assert "sharegpt" in asked.flags() and "--random-input-len" not in asked.flags()


# -- what bench_serving writes -----------------------------------------------------------------------------------------


def test_a_recorded_line_of_bench_serving_is_read() -> None:
    found = figures(json.loads(RECORDED.read_text()))
    assert found["answered"] == found["completed"] == 4
    for name in ("output_throughput", "median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "longest_pause_ms"):
        assert found[name] > 0
    assert found["longest_pause_ms"] >= found["p99_itl_ms"]
    assert len(found["ttft_ms_by_third"]) == 3


# -- a run without servers ---------------------------------------------------------------------------------------------


class FakeServer:
    url, command, start_seconds = "http://nowhere", ["python", "-m", "x"], 1.0

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def check(self) -> None:
        pass


class FakeBenchmark(FakeServer):
    """Stand-in for the benchmark process: pauses grow with the rate, and rate 3 fails."""

    def run(self, _target: Any, asked: Asked, _seconds: float) -> dict[str, Any]:
        if asked.rate == 3:
            raise RuntimeError("lost")
        told = point(asked.rate, 50 * asked.rate, answered=asked.prompts) | {"asked": asked.prompts}
        return {name: value for name, value in told.items() if name not in ("configuration", "workload", "rate")}


@pytest.fixture
def run_without_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    write_model(tmp_path / "model", TINY, Character())
    monkeypatch.setattr(arrivals, "Server", FakeServer)
    monkeypatch.setattr(arrivals, "Benchmark", FakeBenchmark)

    def run(*flags: str) -> dict[str, Any]:
        common = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out.json"), "--device", "cpu"]
        arrivals.Arrivals(arrivals.parsed([*common, *flags]), tmp_path).run()
        return dict(json.loads((tmp_path / "out.json").read_text()))

    return run


def test_rates_above_one_that_was_not_sustained_are_left_out(run_without_servers: Any) -> None:
    found = run_without_servers("--runs", "stock", "--workloads", "256:8@1,2,4,8 512:8@3,5")
    assert [one["rate"] for one in found["points"]] == [1, 2, 4, 3]
    assert len(found["left_out"]) == 2 and "8: 4 was not sustained" in found["left_out"][0]
    assert "lost" in found["points"][-1]["error"] and found["servers"][0]["configuration"] == "stock"


def test_points_of_an_earlier_result_are_not_measured_again(run_without_servers: Any, tmp_path: Path) -> None:
    run_without_servers("--runs", "stock", "--workloads", "256:8@1")
    (tmp_path / "out.json").rename(tmp_path / "old.json")
    flags = ("--runs", "stock,hybrid", "--workloads", "256:8@1,2", "--with", str(tmp_path / "old.json"))
    found = run_without_servers(*flags)
    measured = [(one["configuration"], one["rate"]) for one in found["points"]]
    assert measured == [("stock", 1), ("stock", 2), ("hybrid", 1), ("hybrid", 2)]


def test_a_lease_that_is_over_leaves_everything_out(run_without_servers: Any) -> None:
    found = run_without_servers("--runs", "stock", "--lease", "30")
    assert found["points"] == [] and "s of the lease are left" in found["left_out"][0]
