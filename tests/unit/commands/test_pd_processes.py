"""The environment of processes that `sglang-hybrid pd` and the benchmarks start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglang_hybrid.commands.pd import command_lines
from sglang_hybrid.commands.pd.processes import ServerProcess


def test_a_member_has_what_it_is_given_before_what_we_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OURS", "kept")
    monkeypatch.setenv("BOTH", "lost")
    program = "import os; print(os.environ['OURS'], os.environ['BOTH'])"
    member = ServerProcess("one", [sys.executable, "-c", program], tmp_path / "log", {"BOTH": "given"})
    assert member.process.wait(timeout=60) == 0
    assert member.log.read_text() == "kept given\n"


def test_what_the_user_says_comes_before_our_settings_of_instances() -> None:
    users = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "7", "HOME": "/"}
    ours = command_lines.environment_beside(users)
    assert ours.keys() == command_lines.ENVIRONMENT.keys() - users.keys()
