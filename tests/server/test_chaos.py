"""Chaos runs (``bench.chaos``): two minutes of random faults give no wrong token, and planted bugs are found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import build_native
import forking
import pytest

from bench.chaos.switches import ROWS_NOT_RESET
from sglang_hybrid import env

ROOT = Path(__file__).parents[2]
# Planted bugs: file, text to replace, replacement.
NO_GENERATION_CHECK = (
    "engine/mailbox_client.cpp",
    "if (load_acquire(reply.generation) != posts_[sequence % mailbox_slots].generation) return false;",
    "",
)
REPLIES_NOT_CLEARED = (
    "engine/mailbox_client.cpp",
    "for (uint32_t row = 0; row < lists.rows; ++row) store_release(view.reply(sequence, row).sequence, 0);",
    "",
)
# The tail is never a miss: a list has at most one block less than the budget. The bug leaves one task too few.
SCRATCH_ONE_TASK_SHORT = (
    "engine/engine.cpp",
    "tasks_per_row_(geometry.kv_heads * most_tasks_of(geometry.max_blocks, options.task_blocks) + guard_tasks)",
    "tasks_per_row_(geometry.kv_heads * (most_tasks_of(geometry.max_blocks, options.task_blocks) - 1) - 1)",
)
RAW = ("--prediction", "raw")
# Settings that make lists of misses as long as possible.
LONG_LISTS = (
    "sink_blocks=0", "recent_blocks=0", "scout.resident_tokens=0", "scout.min_miss_attention=0", "worker_threads=2",
)  # fmt: skip
A_TASK_FOR_EACH_BLOCK = {env.WORKER_TASK_BLOCKS.name: "1"}
# Lists of one block. A budget of three blocks holds sink, tail and one more, which stays the same for several steps.
SHORT_LISTS = (
    "sink_blocks=1", "recent_blocks=0", "budget_tokens=96", "scout.resident_tokens=0", "scout.min_miss_attention=0",
)  # fmt: skip


def settings(hybrid: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for setting in hybrid for part in ("--hybrid", setting))


def chaos(directory: Path, *arguments: str, minutes: float, **environment: str) -> tuple[int, dict[str, Any]]:
    """Run ``bench.chaos`` with these arguments; return its exit status and its summary."""
    summary = directory / "summary.json"
    command = [sys.executable, "-m", "bench.chaos", "--minutes", str(minutes), "--json", str(summary)]
    done = subprocess.run(
        [*command, "--keep", str(directory), *arguments],
        env=os.environ | forking.environment() | environment, capture_output=True, text=True, check=False, timeout=1500,
    )  # fmt: skip
    print(done.stdout[-3000:], done.stderr[-3000:])
    return done.returncode, json.loads(summary.read_text())


@pytest.mark.parametrize("prediction", ["raw", pytest.param("none", marks=pytest.mark.full)])
def test_two_minutes_of_chaos_cost_no_token(prediction: str, tmp_path: Path) -> None:
    status, summary = chaos(tmp_path, "--prediction", prediction, "--requests", "5", "--longest", "700", minutes=2)
    assert status == 0
    assert summary["faults survived"] >= 30
    assert summary["answers"] > 20
    assert summary["wrong tokens"] == summary["lost"] == summary["failed"] == 0
    assert summary["leaked"] == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("patch", "arguments", "environment"),
    [
        pytest.param(NO_GENERATION_CHECK, RAW, {}, id="no generation check"),
        # With two layers each layer always uses the same mailbox slot. An old reply passes for the reply of the next
        # step only if both steps list the same blocks: so lists have one block.
        pytest.param(
            REPLIES_NOT_CLEARED,
            ("--layers", "2", "--prediction", "none", *settings(SHORT_LISTS)),
            {},
            id="replies not cleared",
        ),
        pytest.param(
            SCRATCH_ONE_TASK_SHORT,
            (*RAW, *settings(LONG_LISTS)),
            A_TASK_FOR_EACH_BLOCK,
            id="scratch one task short",
        ),
        pytest.param(None, (*RAW, "--bug", ROWS_NOT_RESET), {}, id="rows not reset"),
    ],
)
def test_a_bug_on_purpose_is_found(
    patch: tuple[str, str, str] | None, arguments: tuple[str, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    if patch:
        environment = {**environment, env.NATIVE_LIBRARY.name: str(built_with(*patch, tmp_path / "build"))}
    quick = ("--requests", "6", "--longest", "700", "--stop-at-first")
    _status, summary = chaos(tmp_path, *quick, *arguments, minutes=3, **environment)
    assert summary["wrong tokens"] > 0, summary


def built_with(file: str, there: str, instead: str, directory: Path) -> Path:
    """Build the CPU library in ``directory`` with ``there`` replaced by ``instead`` in ``file``; return its path."""
    source = directory / "cpu"
    shutil.copytree(ROOT / "kernels/cpu", source)
    changed = source / "src" / file
    text = changed.read_text()
    assert text.count(there) == 1, "the bug has to be put elsewhere now"
    changed.write_text(text.replace(there, instead))
    for command in (
        ["cmake", "-S", str(source), "-B", str(directory / "made"), "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", str(directory / "made"), "--parallel", "2"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return directory / "made" / build_native.LIBRARY
