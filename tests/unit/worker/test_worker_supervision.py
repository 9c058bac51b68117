"""The scheduler's side of real worker processes: started, attached, killed, replaced, without lost misses."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch
import zmq
from attention_oracle import seeded
from prometheus_client import REGISTRY
from worker_process import BLOCK_TOKENS, PATIENCE_S, eventually, is_stopped, short_directory
from worker_process import WorkerProcess as StartedByHand

from sglang_hybrid.core import BlockList, LayerCache, Partial
from sglang_hybrid.metrics import Rank, WorkerMetrics
from sglang_hybrid.ops import reference, reference_weights
from sglang_hybrid.ops.cpu.local import LocalAttention
from sglang_hybrid.ops.cpu.structs import DTYPES, MASKS, VALUE_SUMS, Geometry
from sglang_hybrid.protocol.mailbox import Mailbox
from sglang_hybrid.protocol.messages import ThreadPlan
from sglang_hybrid.protocol.region import RegionError, SharedRegion
from sglang_hybrid.worker import connection as link_module
from sglang_hybrid.worker import supervisor as supervisor_module
from sglang_hybrid.worker.connection import WorkerConnection
from sglang_hybrid.worker.miss_server import PendingAttention
from sglang_hybrid.worker.process import remove_leftovers
from sglang_hybrid.worker.remote_attention import WorkerMisses
from sglang_hybrid.worker.supervisor import Supervisor, WorkerError, WorkerSettings

ROWS, KV_HEADS, GROUP, HEAD_DIM, MAX_BLOCKS, LAYERS, PAGES = 4, 2, 3, 64, 6, 2, 16
SCALE = 0.125
# One thread, because these tests are not about speed. The worker may be silent for as long as a test may take, except
# in tests of silence.
SETTINGS = WorkerSettings(None, ThreadPlan(threads=1, cores="none"), longest_pause_s=0.2, silence_s=PATIENCE_S)


@dataclass(frozen=True)
class Pool:
    region: SharedRegion
    keys: torch.Tensor  # [layer][page]...
    values: torch.Tensor
    geometry: Geometry
    local: LocalAttention


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    shape = (LAYERS, PAGES, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    size = 4 * torch.Size(shape).numel()
    with SharedRegion(SharedRegion.size_for(size, size)) as region:
        keys, values = (region.take(shape, torch.float32) for _ in range(2))
        for tensor, seed in ((keys, 1), (values, 2)):
            tensor.copy_(torch.randn(shape, generator=seeded(seed)))
        geometry = Geometry(
            ROWS, KV_HEADS, GROUP, HEAD_DIM, DTYPES["float32"], MAX_BLOCKS, LAYERS, PAGES,
            0, values.data_ptr() - keys.data_ptr(), size // LAYERS, region.size, MASKS | VALUE_SUMS,
        )  # fmt: skip
        yield Pool(region, keys, values, geometry, LocalAttention(region.address, geometry, 8, threads=1))


class Server:
    """The part of a scheduler under test: a supervisor, and a miss server that uses its worker."""

    _ranks = iter(range(1000, 2000))  # a new rank for each server: all servers share the metrics of this process

    def __init__(self, pool: Pool, settings: WorkerSettings = SETTINGS, deadline_s: float = PATIENCE_S) -> None:
        self._pool = pool
        self._rank = next(self._ranks)
        self._step = 0
        self.changes: queue.Queue[bool] = queue.Queue()
        metrics = WorkerMetrics(Rank(self._rank, replica=1))

        def changed(up: bool) -> None:
            metrics.worker_is(up)
            self.changes.put(up)

        self.supervisor = Supervisor(settings, pool.geometry, pool.region.fd)
        self.supervisor.on_change = changed
        self.misses = WorkerMisses(self.supervisor, pool.local, deadline_s, metrics)

    def __enter__(self) -> Server:
        try:
            self.supervisor.start()
        except BaseException:
            self.supervisor.stop()
            raise
        self.expect(up=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.stop()

    @property
    def pid(self) -> int:
        assert self.supervisor.link is not None
        return self.supervisor.link.pid

    def expect(self, *, up: bool) -> None:
        assert self.changes.get(timeout=PATIENCE_S) is up

    def metric(self, name: str, **labels: str) -> float:
        value = REGISTRY.get_sample_value(f"sglang_hybrid_{name}", {"replica": "1", "rank": str(self._rank), **labels})
        return value or 0.0

    def served_by(self, whom: str) -> float:
        return self.metric("miss_rows_total", by=whom)

    def post(self) -> Callable[[], None]:
        """Post a random layer of one of three kinds. Return a function that collects the result and checks it."""
        self._step += 1
        layer = self._step % LAYERS
        random = seeded(self._step)
        query = torch.randn(ROWS, KV_HEADS * GROUP, HEAD_DIM, generator=random)
        counts = torch.randint(0, MAX_BLOCKS + 1, (ROWS, KV_HEADS, 1), generator=random)
        beyond = torch.arange(MAX_BLOCKS) >= counts
        ids = torch.randint(0, PAGES, beyond.shape, generator=random).masked_fill(beyond, reference.NO_BLOCK)
        fill = torch.full(beyond.shape, BLOCK_TOKENS).masked_fill(beyond, 0)
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        cache = LayerCache(keys, values, torch.empty(0), layer)
        if self._step % 3 == 2:
            weights = torch.rand(ROWS, KV_HEADS, GROUP, MAX_BLOCKS, BLOCK_TOKENS, generator=random)
            sums = self.misses.post_sum(weights, cache, ids, self._step)
            expected_sums = reference_weights.sum_values(weights, values, ids)
            return lambda: torch.testing.assert_close(sums.collect(), expected_sums, rtol=1e-5, atol=1e-5)
        masks = torch.randint(-(2**31), 2**31, ids.shape, generator=random).int() if self._step % 3 else None
        posted: PendingAttention = self.misses.post(query, cache, BlockList(ids, fill, masks), SCALE, self._step)

        def collect() -> None:
            result: Partial = posted.collect()
            expected = reference.attend_blocks(query, keys, values, ids, fill, SCALE, masks=masks)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)

        return collect

    def serve(self) -> str:
        """Post and collect one layer. Return "worker" if the worker served all rows, else the reason why it did not."""
        before = {whom: self.served_by(whom) for whom in WHOM}
        self.post()()
        return [whom for whom in WHOM if self.served_by(whom) > before[whom]][-1]


WHOM = ("worker", "process-no-worker", "process-late", "process-behind", "process-damaged", "process-overwritten")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "sglang.srt.hybrid")
    return caplog


def our_directories() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"sglang-hybrid-{os.getpid()}-*"))


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "cpu_worker" in child.cmdline()]


# -- a worker of our own -----------------------------------------------------------------------


def test_results_are_right_before_during_and_after_a_kill(pool: Pool, log: pytest.LogCaptureFixture) -> None:
    with Server(pool) as server:
        first = server.pid
        assert server.serve() == "worker"

        os.kill(first, signal.SIGSTOP)  # so that the worker dies with an unanswered post
        assert eventually(lambda: is_stopped(first))
        collect = server.post()
        os.kill(first, signal.SIGKILL)
        collect()
        assert server.served_by("process-no-worker") > 0
        server.expect(up=False)

        server.expect(up=True)
        assert server.pid != first
        assert server.serve() == "worker"
        assert server.supervisor.restarts == 1
        assert (server.metric("worker_up"), server.metric("worker_starts_total")) == (1, 2)
        assert server.metric("degraded") == 0
    assert f"CPU worker {first} is gone (it was killed by SIGKILL): this process computes its attention" in log.text
    assert "serves again (restart 1): provider native" in log.text
    assert "rows were computed in the server process: " in log.text and "because there was no worker" in log.text


def test_a_layer_that_two_newer_posts_overwrote_is_computed_here_and_the_log_says_why(
    pool: Pool, log: pytest.LogCaptureFixture
) -> None:
    with Server(pool) as server:
        collects = [server.post() for _ in range(3)]
        for collect in collects:  # compares each result with the reference
            collect()
        assert server.served_by("process-overwritten") == ROWS
        assert server.served_by("worker") == 2 * ROWS
        assert server.supervisor.link is not None and not server.supervisor.link.late, "the worker answered in time"
        assert server.serve() == "worker"
    assert (
        f"misses of {ROWS} rows were computed in the server process: {ROWS} because the policy posted two" in log.text
    )


def test_blocks_are_counted_by_who_attended_to_them_and_waits_by_step(pool: Pool) -> None:
    with Server(pool) as server:
        counts = server.misses.served.by_path
        assert counts == {"worker": 0, "process": 0} and sum(server.misses.waits.counts) == 0
        assert server.serve() == server.serve() == "worker"
        assert counts["worker"] > 0 == counts["process"]
        assert sum(server.misses.waits.counts) == 1  # the second step is counted when another one waits
        described = server.misses.describe_worker()
        assert described["attached"] and described["pid"] == server.pid and described["provider"] == "native"

        link, server.supervisor.link = server.supervisor.link, None
        before = dict(counts)
        assert server.serve() == "process-no-worker"
        assert counts["process"] > 0 and counts["worker"] == before["worker"]
        assert sum(server.misses.waits.counts) == 1  # without a worker nothing is waited for
        assert server.misses.describe_worker() == {"attached": False, "restarts": 0}
        server.supervisor.link = link  # so that the supervisor stops its worker


def test_a_worker_is_given_up_the_moment_it_dies(pool: Pool) -> None:
    """The end of its connection comes later, because the kernel frees a killed process's memory first.

    No supervisor's thread watches the worker in this test.
    """
    supervisor = Supervisor(SETTINGS, pool.geometry, pool.region.fd)
    link = supervisor._connect()
    try:
        assert not link.mailbox.wait_for_end(0.05)
        assert link.gone.value == 0
        os.kill(link.pid, signal.SIGKILL)
        assert eventually(lambda: link.gone.value == 1)
        assert link.mailbox.wait_for_end(0.05)
    finally:
        link.close()
        supervisor.stop()


def test_while_there_is_no_worker_this_process_computes(pool: Pool) -> None:
    with Server(pool) as server:
        may_restart = threading.Event()
        tell = server.supervisor.on_change

        def hold(up: bool) -> None:
            tell(up)
            assert up or may_restart.wait(PATIENCE_S)

        server.supervisor.on_change = hold
        os.kill(server.pid, signal.SIGKILL)
        server.expect(up=False)
        assert server.supervisor.link is None
        assert [server.serve() for _ in range(3)] == ["process-no-worker"] * 3
        assert (server.metric("worker_up"), server.metric("degraded")) == (0, 1)
        server.misses.wake()  # there is no worker to wake, and no error
        may_restart.set()
        server.expect(up=True)
        assert server.serve() == "worker"


def test_workers_that_die_in_a_row_are_all_replaced(pool: Pool) -> None:
    with Server(pool) as server:
        lived = {server.pid}
        for _ in range(3):
            os.kill(server.pid, signal.SIGKILL)
            server.expect(up=False)
            server.post()()
            server.expect(up=True)
            assert server.serve() == "worker"
            lived.add(server.pid)
        assert (len(lived), server.supervisor.restarts) == (4, 3)
        assert [worker.pid for worker in workers()] == [server.pid]
        assert len(our_directories()) == 1


def test_a_worker_that_hangs_is_done_without_and_then_replaced(pool: Pool, log: pytest.LogCaptureFixture) -> None:
    with Server(pool, replace(SETTINGS, silence_s=0.5), deadline_s=0.01) as server:
        stuck = server.pid
        os.kill(stuck, signal.SIGSTOP)
        assert eventually(lambda: is_stopped(stuck))
        assert server.serve() != "worker"
        server.expect(up=False)
        server.expect(up=True)
        assert not psutil.pid_exists(stuck)
        assert eventually(lambda: server.serve() == "worker")
    assert f"CPU worker {stuck} has not answered for 0.5 s (it was killed by SIGKILL)" in log.text


def test_a_worker_that_was_late_gets_nothing_new_until_it_has_caught_up(pool: Pool) -> None:
    with Server(pool, deadline_s=0.01) as server:
        link = server.supervisor.link
        assert link is not None
        os.kill(link.pid, signal.SIGSTOP)
        assert eventually(lambda: is_stopped(link.pid))
        assert [server.serve() for _ in range(3)] == ["process-late", "process-behind", "process-behind"]
        assert server.metric("degraded") == 1
        assert link.mailbox.posted == 1
        os.kill(link.pid, signal.SIGCONT)
        assert eventually(lambda: link.mailbox.caught_up)
        server.post()()
        assert link.mailbox.posted == 2
        assert server.supervisor.link is link


def test_a_worker_that_cannot_do_what_it_is_told_is_an_error_at_start(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"the CPU worker cannot be used: .*99999") as refused:
        Server(pool, replace(SETTINGS, plan=ThreadPlan(cores="99999"))).__enter__()
    assert "\n" not in str(refused.value)
    assert not workers()
    assert not our_directories()


def test_a_worker_that_cannot_even_run_is_an_error_at_start(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(WorkerError, match=r"the CPU worker cannot be used: .*/nowhere/python"):
        Server(pool).__enter__()
    assert not our_directories()


def test_a_worker_that_ends_at_once_is_an_error_at_start(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match="the CPU worker cannot be used: the worker went away"):
        Server(pool).__enter__()
    assert not our_directories()


def test_a_restart_that_fails_is_tried_again_and_told(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    failures = iter(range(2))

    def scarce(geometry: Geometry) -> Mailbox:
        if next(failures, None) is not None:
            raise RegionError("cannot take 0.01 GiB of shared host memory: no space left")
        return Mailbox(geometry)

    with Server(pool) as server:
        monkeypatch.setattr(link_module, "Mailbox", scarce)
        os.kill(server.pid, signal.SIGKILL)
        server.expect(up=False)
        server.post()()
        server.expect(up=True)
        assert server.serve() == "worker"
        assert server.supervisor.restarts == 1
        assert [worker.pid for worker in workers()] == [server.pid]
    told = [message for message in log.messages if "could not be started again" in message]
    assert len(told) == 2
    for message in told:
        assert "cannot take 0.01 GiB of shared host memory: no space left; next try in 0.2 s" in message


# -- what would end a careless watch -----------------------------------------------------------


@contextlib.contextmanager
def at_most(descriptors: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_signal_without_a_name_does_not_end_the_watch(pool: Pool, log: pytest.LogCaptureFixture) -> None:
    """Python has names for two of the real-time signals only. Asking for another one's name must not end the watch."""
    number = signal.SIGRTMIN + 3
    with Server(pool) as server:
        os.kill(server.pid, number)
        server.expect(up=False)
        server.expect(up=True)
        assert server.serve() == "worker"
    assert f"(it was killed by signal {number})" in log.text


def test_descriptors_that_have_run_out_do_not_end_the_watch(pool: Pool, log: pytest.LogCaptureFixture) -> None:
    """A new worker is started later, when descriptors are free again. Until then this process computes."""
    with Server(pool) as server:
        used = max(map(int, os.listdir("/proc/self/fd")))
        with contextlib.ExitStack() as taken, at_most(used + 1):

            def take_all() -> None:
                """Take all free descriptors, in the second call also those that the lost worker's connection used."""
                with contextlib.suppress(OSError):
                    while True:
                        taken.enter_context(open(os.devnull))

            take_all()
            os.kill(server.pid, signal.SIGKILL)
            server.expect(up=False)
            take_all()
            assert server.serve() == "process-no-worker"
            assert eventually(lambda: "could not be started again" in log.text)
        server.expect(up=True)
        assert server.serve() == "worker"
    assert "Too many open files" in log.text


def test_descriptors_above_what_select_takes_are_watched(pool: Pool) -> None:
    """A scheduler with a thousand connections has descriptors for which ``select`` raises ValueError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"a process may have {hard} descriptors here")
    with at_most(max(soft, 2048)), contextlib.ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(open(os.devnull))
        with Server(pool) as server:
            os.kill(server.pid, signal.SIGKILL)
            server.expect(up=False)
            server.expect(up=True)
            assert server.serve() == "worker"


def test_an_error_that_nobody_thought_of_does_not_end_the_watch(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    failures = iter(range(2))
    connect = Supervisor._connect

    def without_threads(supervisor: Supervisor) -> WorkerConnection:
        if next(failures, None) is not None:
            raise RuntimeError("can't start new thread")
        return connect(supervisor)

    with Server(pool) as server:
        monkeypatch.setattr(Supervisor, "_connect", without_threads)
        os.kill(server.pid, signal.SIGKILL)
        server.expect(up=False)
        server.expect(up=True)
        assert server.serve() == "worker"
    assert log.text.count("the watch over the CPU worker failed, and goes on in 0.2 s") == 2


def test_workers_that_die_all_the_time_are_not_replaced_for_ever(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor_module, "_CRASHES", 3)
    with Server(pool) as server:
        for _ in range(2):
            os.kill(server.pid, signal.SIGKILL)
            server.expect(up=False)
            server.expect(up=True)
        os.kill(server.pid, signal.SIGKILL)
        server.expect(up=False)
        assert eventually(lambda: "no other one is started" in log.text)
        assert server.serve() == "process-no-worker"
        assert not workers()
    assert sum(record.levelno == logging.ERROR for record in log.records) == 1


# -- nothing is left ---------------------------------------------------------------------------


def descriptors() -> list[str]:
    """Return the targets of all open descriptors, which unlike their numbers are not used again."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the descriptor that lists the directory
            continue
    return sorted(found)


def test_after_stop_nothing_is_left(pool: Pool) -> None:
    zmq.Context.instance().socket(zmq.DEALER).close()  # ZMQ's threads stay for the next client
    gc.collect()
    files, threads, tasks = descriptors(), set(threading.enumerate()), len(os.listdir("/proc/self/task"))
    with Server(pool) as server:
        assert server.serve() == "worker"
        os.kill(server.pid, signal.SIGKILL)  # a killed worker leaves nothing either
        server.expect(up=False)
        server.expect(up=True)
        assert server.serve() == "worker"
        last = server.pid
        assert len(descriptors()) > len(files)
    assert server.supervisor.link is None
    assert not psutil.pid_exists(last)
    assert not workers()
    assert not our_directories()
    assert set(threading.enumerate()) == threads
    assert eventually(lambda: len(os.listdir("/proc/self/task")) <= tasks)
    del server
    gc.collect()
    assert descriptors() == files


def test_a_worker_that_is_stopped_by_a_signal_does_not_outlive_its_server(pool: Pool) -> None:
    with Server(pool) as server:
        stuck = server.pid
        os.kill(stuck, signal.SIGSTOP)
        assert eventually(lambda: is_stopped(stuck))
    assert not psutil.pid_exists(stuck)
    assert not our_directories()


# -- a worker of somebody else -----------------------------------------------------------------


def test_a_worker_started_by_hand_is_joined_survives_its_server_and_is_joined_again(pool: Pool) -> None:
    with short_directory() as directory, StartedByHand(directory=directory) as by_hand:
        by_hand.ready()
        for _ in range(2):
            with Server(pool, replace(SETTINGS, directory=directory)) as server:
                assert server.pid == by_hand.pid
                assert server.serve() == "worker"
                assert not our_directories()
            assert by_hand.process.poll() is None
        assert directory.is_dir()


def test_when_a_worker_started_by_hand_dies_its_successor_in_the_directory_is_joined(
    pool: Pool, log: pytest.LogCaptureFixture
) -> None:
    with (
        short_directory() as directory,
        contextlib.ExitStack() as after_the_server,
        StartedByHand(directory=directory) as first,
        Server(pool, replace(SETTINGS, directory=directory)) as server,
    ):
        assert server.serve() == "worker"
        first.process.kill()
        server.expect(up=False)
        assert server.serve() == "process-no-worker"
        second = after_the_server.enter_context(StartedByHand(directory=directory))
        server.expect(up=True)
        assert server.pid == second.pid
        assert server.serve() == "worker"
    assert f"CPU worker {first.pid} is gone (it let go of this server)" in log.text


def test_a_worker_serves_one_server_and_the_second_is_told(pool: Pool) -> None:
    with short_directory() as directory, StartedByHand(directory=directory) as by_hand:
        by_hand.ready()
        settings = replace(SETTINGS, directory=directory)
        with Server(pool, settings) as server:
            with pytest.raises(WorkerError, match="this worker serves another server; give each server a worker"):
                Server(pool, settings).__enter__()
            assert server.serve() == "worker"


def test_a_directory_that_is_not_there_is_an_error_at_start(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="cannot be used: No such file or directory"):
        Server(pool, replace(SETTINGS, directory=Path("/nowhere/at-all"))).__enter__()


# -- leftovers ---------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def dead() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leave(temporary: Path, name: str) -> Path:
    directory = temporary / name
    directory.mkdir(mode=0o700)
    (directory / "control.sock").touch()
    return directory


def test_directories_of_dead_servers_are_removed_and_no_others(temporary: Path, dead: int) -> None:
    left = [leave(temporary, f"sglang-hybrid-{dead}-{end}") for end in ("abc", "x-y")]
    kept = [
        leave(temporary, name)
        for name in (
            f"sglang-hybrid-{os.getpid()}-abc",
            f"sglang-hybrid-{os.getppid()}-abc",
            f"sglang-hybrid-{dead}",  # of a worker started by hand, which has no owner
            "sglang-hybrid-k2j4-x",
            f"sglang-hybrid-{dead}x-y",
            f"sglang-{dead}-abc",
            f"sglang-hybrid-{'9' * 30}-abc",  # no process ever had such an id
        )
    ]
    link = temporary / f"sglang-hybrid-{dead}-link"
    link.symlink_to(kept[0])
    remove_leftovers()
    assert not any(directory.exists() for directory in left)
    assert all((directory / "control.sock").exists() for directory in kept)


def test_a_directory_in_which_a_worker_lives_is_kept_whatever_its_owner(
    dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may be a server in another container, whose process id means nothing here."""
    with short_directory() as temporary:
        directory = temporary / f"sglang-hybrid-{dead}-abc"
        directory.mkdir(mode=0o700)
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        with StartedByHand(directory=directory) as worker:
            worker.ready()
            remove_leftovers()
            assert directory.is_dir()
            worker.process.kill()
            worker.wait()
            remove_leftovers()
            assert not directory.exists()


def test_directories_of_other_users_are_not_touched(
    temporary: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = leave(temporary, f"sglang-hybrid-{dead}-abc")
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    remove_leftovers()
    assert (theirs / "control.sock").exists()


def test_a_server_removes_leftovers_when_it_starts(pool: Pool, dead: int) -> None:
    left = leave(Path(tempfile.gettempdir()), f"sglang-hybrid-{dead}-test")
    with pytest.raises(WorkerError):
        Server(pool, replace(SETTINGS, directory=Path("/nowhere/at-all"))).__enter__()
    assert not left.exists()
