"""``python -m bench.worker`` runs on a pool that is too small for meaningful measurements."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import fake_ipex
import pytest
import torch

from bench.worker import memory
from bench.worker.__main__ import main
from bench.worker.arguments import Settings, parse
from bench.worker.memory import GIB, default_pool
from bench.worker.pool import Pool, posts_of
from bench.worker.running import client_cpus
from bench.worker.table import plain_table, print_table
from sglang_hybrid import container
from sglang_hybrid.ops.cpu import variants
from sglang_hybrid.protocol.cores import Core, Placement, Topology, place

TINY = ["--pool", "4MiB", "--threads", "1", "--blocks", "1,8", "--dtypes", "bfloat16", "--seconds", "0.01"]
SIXTEEN = Topology(tuple(Core((cpu,)) for cpu in range(16)))


def settings(tmp_path: Path, **changes: Any) -> Settings:
    values = dict(
        kv_heads=2, group=3, head_dim=64, dtypes=("bfloat16",), variants=("portable",), threads=(1,), blocks=(1, 4),
        pool_bytes=8 << 20, seconds=0.01, out=tmp_path / "out.json",
    )  # fmt: skip
    return Settings(**{**values, **changes})


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "memory", lambda: container.Memory(256 * GIB, 256 * GIB))


# -- a whole run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench") / "result.json"
    assert main([*TINY, "--out", str(out)]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_every_variant_and_number_of_blocks_is_measured_beside_reading(finished: dict[str, Any]) -> None:
    measured = {(entry["variant"], entry["blocks_per_task"]) for entry in finished["attention"]}
    assert measured == {(variant, blocks) for variant in variants() for blocks in (1, 8)}
    (reading,) = finished["read_bandwidth"]["by_threads"]
    assert reading["threads"] == 1
    assert reading["before_gb_s"] > 0 and reading["after_gb_s"] > 0
    beside = [entry["read_beside_gb_s"] for entry in finished["attention"]]
    assert min(beside) > 0
    # the highest rate that these threads read at in any part of the run
    most = max(reading["before_gb_s"], reading["after_gb_s"], *beside)
    assert reading["gb_s"] == finished["read_bandwidth"]["host_gb_s"] == pytest.approx(most, abs=0.01)
    for entry in finished["attention"]:
        assert (entry["dtype"], entry["threads"]) == ("bfloat16", 1)
        assert 0 < entry["median_gb_s"] <= entry["best_gb_s"]
        assert entry["posts"] >= 5
        assert entry["post_bytes"] == entry["rows"] * 8 * entry["blocks_per_task"] * 2 * 32 * 128 * 2
        for percent, of in (
            ("percent_of_read_beside", entry["read_beside_gb_s"]),
            ("percent_of_read_with_same_threads", reading["gb_s"]),
            ("percent_of_host_read", finished["read_bandwidth"]["host_gb_s"]),
        ):
            assert entry[percent] == pytest.approx(100 * entry["median_gb_s"] / of, rel=0.05, abs=0.5)
        assert entry["engine_gb_s"] > 0


def test_torch_is_compared_at_eight_blocks(finished: dict[str, Any]) -> None:
    (entry,) = finished["torch"]
    assert (entry["variant"], entry["blocks_per_task"]) == ("torch", 8)
    native = max(point["median_gb_s"] for point in finished["attention"] if point["blocks_per_task"] == 8)
    assert entry["native_to_torch"] == pytest.approx(native / entry["median_gb_s"], rel=0.05, abs=0.02)


def test_ipex_has_a_row_beside_torch_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    both = [*TINY, "--blocks", "8", "--variants", "portable", "--providers", "torch,ipex", "--out", str(out)]
    with fake_ipex.installed():
        assert main(both) == 0
    result = json.loads(out.read_text())
    (torch_row,), (ipex_row,) = result["torch"], result["ipex"]
    assert (torch_row["variant"], ipex_row["variant"]) == ("torch", "ipex")
    assert ipex_row["native_to_ipex"] > 0 and {entry["variant"] for entry in result["attention"]} == {"portable"}
    assert "native / torch" in (printed := capsys.readouterr().out) and "native / ipex" in printed


def test_a_pool_in_fp8_is_measured_with_queries_in_bfloat16(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    fp8 = [*TINY[:6], "--dtypes", "float8_e4m3fn", "--variants", "portable", "--seconds", "0.01", "--out", str(out)]
    assert main(fp8) == 0
    result = json.loads(out.read_text())
    assert {entry["dtype"] for entry in result["attention"]} == {"float8_e4m3fn"}
    assert all(entry["post_bytes"] == entry["rows"] * 8 * entry["blocks_per_task"] * 2 * 32 * 128
               for entry in result["attention"])  # fmt: skip
    assert result["torch"] and not any("was not measured" in note for note in result["notes"])


def test_the_round_trip_is_told_with_and_without_collecting(finished: dict[str, Any]) -> None:
    trip = finished["round_trip_us"]
    assert (trip["rows"], trip["trips"]) == (64, 2500)
    for times in (trip["collected"], trip["answered"]):
        assert 0 < times["min"] <= times["median"] <= times["p99"]


def test_the_file_says_where_it_comes_from(finished: dict[str, Any]) -> None:
    origin = finished["origin"]
    assert origin["command"].startswith("python -m bench.worker --pool 4MiB --threads 1")
    assert {"commit", "date", "machine", "python"} <= set(origin)
    assert finished["settings"]["pool_bytes"] == 4 << 20
    assert any("last-level cache" in note for note in finished["notes"]) or memory.last_level_cache() is None


def test_the_table_is_printed_and_nothing_is_left_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads, files = len(os.listdir("/proc/self/task")), set(_memory_files())
    allowed = os.sched_getaffinity(0)
    tiny = [*TINY, "--variants", "portable", "--kv-heads", "2", "--group", "3", "--head-dim", "64"]
    assert main([*tiny, "--out", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    header = next(line for line in printed.splitlines() if "reading" in line)
    assert re.search(r"dtype.*variant.*threads.*reading.*1 block\b.*8 blocks", header)
    assert re.search(r"bfloat16.*portable.*\d\.\d \(\d+%\)", printed)
    assert "native / torch" in printed and "round trip of 64 rows without blocks" in printed
    assert len(os.listdir("/proc/self/task")) <= threads + _torch_threads()
    assert set(_memory_files()) <= files
    assert os.sched_getaffinity(0) == allowed


def _memory_files() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the descriptor of the listing itself
            continue
    return [link for link in links if "memfd:sglang-hybrid" in link]


def _torch_threads() -> int:
    """Return the number of threads that torch may have started and keeps."""
    return torch.get_num_threads() + threading.active_count()


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--dtypes", "int8"], "dtype 'int8' must be of bfloat16, float16, float32"),
        (["--variants", "vax"], "variant 'vax' cannot run on this machine, which has"),
        (["--threads", "0"], "'0' must be a number from 1"),
        (["--threads", "4000"], "4000 threads: this process may use 16 CPUs"),
        (["--blocks", "1,x"], "'x' must be a number from 1 to 4096"),
        (["--group", "17"], "'17' must be a number from 1 to 16"),
        (["--head-dim", "80"], "invalid choice: 80"),
        (["--pool", "big"], "'big': must be \"auto\", a size such as"),
        (["--pool", "4000GiB"], "only 256.00 GiB of memory are available"),
        (["--pool", "4MiB"], "too few for 32 different ones in a list: raise --pool to 8MiB"),
        (["--seconds", "0"], "'0' must be a number of seconds"),
        (["--out", "/nowhere/at/all.json"], "there is no directory /nowhere/at"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    given: list[str], told: str, plenty: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(given, SIXTEEN)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_the_default_is_everything_up_to_the_physical_cores(plenty: None) -> None:
    chosen = parse([], SIXTEEN)
    assert chosen.threads == (1, 2, 4, 8, 16)
    assert chosen.blocks == (1, 2, 4, 8, 16, 32)
    assert chosen.dtypes == ("bfloat16", "float16", "float32", "float8_e4m3fn")
    assert chosen.variants == tuple(variants())
    assert (chosen.kv_heads, chosen.group, chosen.head_dim) == (8, 5, 128)
    assert parse(["--quick"], SIXTEEN).threads == (1, 16)


def test_no_more_threads_than_the_container_has_time_for(plenty: None) -> None:
    assert parse([], Topology(SIXTEEN.cores, quota=6.5)).threads == (1, 2, 4, 6)
    assert parse([], Topology(SIXTEEN.cores, quota=0.5)).threads == (1,)


def test_the_pool_is_large_where_memory_allows() -> None:
    assert default_pool(128 * GIB, quick=False) == 16 * GIB
    assert default_pool(128 * GIB, quick=True) == 4 * GIB
    assert default_pool(32 * GIB, quick=False) == 8 * GIB
    assert default_pool(10 * GIB, quick=False) == 4 * GIB
    assert default_pool(2 * GIB, quick=False) == GIB


def test_too_little_memory_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(container, "memory", lambda: container.Memory(GIB, 100 << 20))
    with pytest.raises(SystemExit):
        parse([], SIXTEEN)
    assert "0.10 GiB of memory are available, too little" in capsys.readouterr().err


# -- posts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_posts_walk_through_the_pool_without_meeting_a_block_twice(dtype: str, tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    pool = Pool(chosen)
    posts = posts_of(pool, chosen, dtype, blocks=4)
    pages = posts.pages.permute(2, 0, 1, 3).flatten(1)  # [KV heads, pages]
    assert all(len(of_head.unique()) == len(of_head) for of_head in pages)
    assert pages.shape[1] > pool.pages(dtype) - posts.rows * posts.blocks
    assert pages.min() >= 0 and pages.max() < pool.pages(dtype)
    keys, values = pool.tensors(dtype)
    for tensor in (keys, values):
        assert tensor.float().isfinite().all()
        if dtype != "float8_e4m3fn":  # kernels compute with FP8's subnormal numbers as normal ones
            assert tensor.abs().min() >= torch.finfo(tensor.dtype).tiny, "subnormal numbers would be slow"
    pool.close()


def test_the_client_keeps_off_the_cores_that_compute_where_it_can() -> None:
    assert client_cpus(SIXTEEN, place(SIXTEEN, "auto", 15, 0)) == {0}
    assert client_cpus(SIXTEEN, place(SIXTEEN, "auto", 16, 0)) == {15}, "the lead is on core 0"
    assert client_cpus(SIXTEEN, Placement(2, 2)) == set()


def test_without_rich_the_table_is_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    print_table("title", ["dtype"], [["bfloat16"]])
    assert capsys.readouterr().out == "title\n   dtype\nbfloat16\n"


def test_without_torch_one_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("bench.worker.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(TINY) == 1
    assert "needs torch" in capsys.readouterr().err


def test_columns_of_the_plain_table_are_aligned() -> None:
    table = plain_table("title", ["dtype", "8 blocks"], [["bfloat16", "1.0 (5%)"], ["x", ""]])
    assert table.splitlines() == ["title", "   dtype  8 blocks", "bfloat16  1.0 (5%)", "       x          "]
