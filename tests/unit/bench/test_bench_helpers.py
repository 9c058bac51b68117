"""Helpers that several benchmarks use: leases, GPU memory by nvidia-smi, flags of servers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench import arguments
from bench.lease import Lease
from bench.side_by_side import configurations
from bench.side_by_side.gpu_memory import ServerMemory, total_bytes, used_bytes
from bench.side_by_side.load import abort_message
from bench.side_by_side.server_flags import cache_flags, common_flags, graph_sizes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_allows_what_ends_in_time() -> None:
    clock = Clock()
    lease = Lease(60, clock)
    assert lease.allows(60) and not lease.allows(61)
    clock.now += 50
    assert (lease.left(), lease.at_most(30), lease.at_most(5)) == (10, 10, 5)
    clock.now += 50
    assert lease.left() == 0


def test_without_a_limit_a_lease_never_ends() -> None:
    assert Lease(None).left() == math.inf and Lease(None).allows(1e9)


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *used: str) -> None:
    """Put a program on the PATH that says ``used`` in turn, the last again and again."""
    monkeypatch.setattr(ServerMemory, "_least", None)  # of the real GPU, or of another test
    program, answers = folder / "nvidia-smi", folder / "answers"
    answers.write_text("".join(f"{one}\n" for one in used))
    say = f'head -n 1 {answers}; [ "$(wc -l < {answers})" -eq 1 ] || sed -i 1d {answers}'
    program.write_text(f'#!/bin/sh\ncase "$1" in *total) echo 143771;; *) {say};; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpu_memory_is_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, "1000")
    assert (used_bytes(), total_bytes()) == (1000 << 20, 143771 << 20)
    memory = ServerMemory()
    fake_nvidia_smi(tmp_path, monkeypatch, "21000")
    assert memory.taken() == 20000 << 20
    fake_nvidia_smi(tmp_path, monkeypatch, "[N/A]")
    assert memory.taken() is None


def test_an_earlier_server_is_not_counted_while_the_driver_frees_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, "1000", "21000", "21000", "1100", "3100")
    ServerMemory()
    assert ServerMemory().taken() == 2000 << 20
    assert ServerMemory(seconds=0).taken() == 0  # waits no longer


def test_without_nvidia_smi_no_gpu_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert used_bytes() is None and ServerMemory().taken() is None


def test_servers_of_a_comparison_differ_in_their_caches_only() -> None:
    flags = common_flags(Path("m"), "cuda", [1, 8])
    assert flags[flags.index("--max-running-requests") + 1] == "8" and "--skip-tokenizer-init" in flags
    assert "--skip-tokenizer-init" not in common_flags(Path("m"), "cpu", [1], tokenizer=Path("t"))
    assert cache_flags(configurations.stock("x"), 99, "1GiB") == ["--max-total-tokens", "99"]
    assert cache_flags(configurations.stock_fp8("x"), 99, "1GiB")[-1] == "fp8_e4m3"
    assert cache_flags(configurations.hybrid([]), 99, "1GiB") == ["--hybrid", "host_memory=1GiB"]
    assert cache_flags(configurations.hybrid_fp8([]), 99, "1GiB")[-2:] == ["--kv-cache-dtype", "fp8_e4m3"]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20] and graph_sizes(1) == [1]


def test_a_program_that_needs_the_plugin_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "is_installed", lambda: False)
    with pytest.raises(SystemExit, match="pip install"):
        arguments.require_plugin()


def test_what_sglang_says_to_a_request_that_it_refuses_is_told() -> None:
    refused = {"type": "abort", "message": "Input length (9 tokens) exceeds the maximum allowed length (8 tokens)."}
    assert abort_message({"finish_reason": refused}).startswith("Input length (9 tokens) exceeds")
    assert abort_message({"finish_reason": {"type": "abort"}}) == "aborted"
    assert abort_message({"finish_reason": {"type": "length", "length": 8}}) == abort_message({}) == ""
