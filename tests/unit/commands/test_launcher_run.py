"""A launcher leaves nothing behind, however it ends. Small programs in real processes stand in for a server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sglang_hybrid.commands import shared_memory

# Creates what a server creates (a semaphore, a temporary file, a process in its own session) and ignores SIGTERM.
SERVER = """
import multiprocessing, pathlib, signal, subprocess, sys, tempfile, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
semaphore = multiprocessing.get_context("spawn").Semaphore()
file = tempfile.NamedTemporaryFile(delete=False)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text("up")
time.sleep(600)
"""
LAUNCHER = """
import sys
from sglang_hybrid.commands.interrupts import Interrupts
from sglang_hybrid.commands.run import Run
import select, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it, and a launcher respects that
interrupts = Interrupts()
interrupts.watch()
with Run() as run:
    run.start("server", [sys.executable, "-c", sys.argv[1], sys.argv[2]])
    print(run.directory, flush=True)
    select.select([interrupts], [], [])
"""


class Launcher:
    def __init__(self, temporary: Path, tmp_path: Path) -> None:
        self.temporary = temporary
        self.family: list[psutil.Process] = []
        self._up = Path(tempfile.mkdtemp(dir=tmp_path)) / "up"
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, SERVER, str(self._up)], env=os.environ | {"TMPDIR": str(temporary)},
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def wait_until_it_serves(self) -> None:
        assert self.process.stdout
        self.directory = Path(self.process.stdout.readline().strip())
        wait_for(self._up.exists)
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        self.shared = shared_memory.files_mapped_by(process.pid for process in self.family)
        assert len(self.family) >= 4  # guard, server, the server's resource tracker and its other process
        assert shared_memory.names_of(self.shared)

    def guard(self) -> psutil.Process:
        return next(process for process in self.family if process.name() == "hybrid-guard")

    def assert_nothing_is_left(self) -> None:
        _gone, alive = psutil.wait_procs(self.family, timeout=20)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        wait_for(lambda: not self.directory.exists())
        wait_for(lambda: not shared_memory.names_of(self.shared))
        assert not list(self.temporary.glob("sglang-hybrid-*"))


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # other processes change it: there is no event to wait for


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    temporary = Path(tempfile.mkdtemp(prefix="t-"))  # short: paths of Unix sockets are limited
    running = Launcher(temporary, tmp_path)
    try:
        running.wait_until_it_serves()
        yield running
    finally:
        for process in (*running.family, *_children(running.process.pid)):
            if process.is_running():
                process.kill()
        running.process.kill()
        running.process.wait()
        shutil.rmtree(temporary)


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_when_the_launcher_is_asked_to_end(launcher: Launcher, number: int) -> None:
    launcher.process.send_signal(number)
    assert launcher.process.wait(20) == 0
    launcher.assert_nothing_is_left()


def test_nothing_is_left_when_the_whole_group_is_asked_several_times(launcher: Launcher) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        os.killpg(launcher.process.pid, number)
    assert launcher.process.wait(20) == 0
    launcher.assert_nothing_is_left()


def test_nothing_is_left_when_the_launcher_is_killed(launcher: Launcher) -> None:
    launcher.process.kill()
    launcher.assert_nothing_is_left()


def test_nothing_is_left_when_the_guard_is_killed_first(launcher: Launcher) -> None:
    launcher.guard().kill()
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.wait(20) == 0
    launcher.assert_nothing_is_left()


def test_the_next_start_removes_what_a_double_kill_left(launcher: Launcher, tmp_path: Path) -> None:
    guard = launcher.guard()
    guard.suspend()  # so that the guard does not clean up before it is killed
    launcher.process.kill()
    launcher.process.wait()
    guard.kill()
    psutil.wait_procs([guard], timeout=20)
    assert launcher.directory.exists()
    for process in launcher.family:
        if process.is_running():
            process.kill()
    again = Launcher(launcher.temporary, tmp_path)
    again.wait_until_it_serves()
    again.process.send_signal(signal.SIGTERM)
    again.process.wait(20)
    assert not launcher.directory.exists()
    again.assert_nothing_is_left()


def test_files_in_shared_memory_that_others_use_are_kept() -> None:
    import multiprocessing

    semaphore = multiprocessing.get_context("spawn").Semaphore()
    mine = shared_memory.files_mapped_by([os.getpid()])
    names = shared_memory.names_of(mine)
    assert names
    shared_memory.remove(mine)
    assert shared_memory.names_of(mine) == names
    del semaphore
