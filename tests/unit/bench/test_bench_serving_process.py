"""The process that runs SGLang's serving benchmark many times, tested with a stand-in program."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.serving import benchmark
from bench.serving.benchmark import Asked, Benchmark, Target
from sglang_hybrid.commands.pd.processes import ServerProcess

RECORDED = Path(__file__).parent / "recorded" / "bench-serving.jsonl"
TARGET = Target("http://127.0.0.1:1", Path("model"), Path("tokenizer"))

# Stand-in for bench/serving/late_benchmark.py: rate 1 succeeds, rate 2 fails, rate 3 hangs.
STAND_IN = """
import json, pathlib, shutil, sys, time
folder, number = pathlib.Path(sys.argv[1]), 0
while True:
    asked = folder / f"{number}.json"
    if not asked.exists():
        time.sleep(0.02)
        continue
    flags = json.loads(asked.read_text())
    rate = flags[flags.index("--request-rate") + 1]
    if rate == "3":
        time.sleep(600)
    if rate == "1":
        shutil.copy(RECORDED, flags[flags.index("--output-file") + 1])
    print("no such model", flush=True)
    (folder / f"{number}.status").write_text("0" if rate == "1" else "1")
    number += 1
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN.replace("RECORDED", repr(str(RECORDED))))
    processes: list[Any] = []

    class Process(ServerProcess):
        def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str]) -> None:
            super().__init__(name, [sys.executable, str(program), command[-1]], log, environment)
            processes.append(self.process)

    monkeypatch.setattr(benchmark, "ServerProcess", Process)
    return processes


def asked(rate: int) -> Asked:
    return Asked(4, 256, 8, 64, rate)


def test_one_process_runs_the_benchmark_many_times(tmp_path: Path, started: list[Any]) -> None:
    with Benchmark(tmp_path) as process:
        found = [process.run(TARGET, asked(1), 30) for _ in range(2)]
    assert [one["answered"] for one in found] == [4, 4] and len(started) == 1
    assert started[0].poll() is not None


def test_a_run_that_fails_is_told_with_the_end_of_its_output(tmp_path: Path, started: list[Any]) -> None:
    with Benchmark(tmp_path) as process:
        with pytest.raises(RuntimeError, match="no such model"):
            process.run(TARGET, asked(2), 30)
        assert process.run(TARGET, asked(1), 30)["answered"] == 4


def test_a_run_that_hangs_is_ended_and_the_next_one_works(tmp_path: Path, started: list[Any]) -> None:
    with Benchmark(tmp_path) as process:
        with pytest.raises(TimeoutError, match="was not done"):
            process.run(TARGET, asked(3), 0.5)
        assert started[0].poll() is not None
        assert process.run(TARGET, asked(1), 30)["answered"] == 4
    assert len(started) == 2 and json.loads(RECORDED.read_text())["completed"] == 4
