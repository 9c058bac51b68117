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


def test_instances_keep_every_connection_on_which_the_router_may_send(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.environ import envs
    from sglang_router.router_args import RouterArgs

    name = "SGLANG_TIMEOUT_KEEP_ALIVE"
    monkeypatch.setenv(name, command_lines.ENVIRONMENT[name])
    # An instance counts from its answer. The router may read that answer a whole request later, when the other instance
    # has answered, and reuses the connection until it was idle for 50 s (a constant in its program).
    assert envs.SGLANG_TIMEOUT_KEEP_ALIVE.get() > RouterArgs().request_timeout_secs + 50
