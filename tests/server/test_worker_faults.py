"""Clients notice no fault of the CPU worker: faults are injected into a real server under load.

In every case the text is that of the undisturbed run, no stream pauses for more than two seconds (or 1.5 seconds more
than a usual step, where that is longer), the server's processes leak nothing, and the log says what happened. All tests
run in make test-full; make test runs chaos instead.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import requests
import zmq
from real_server import Server

from bench.chaos.mailbox_memory import MailboxMemory
from bench.chaos.switches import SAME_BITS, in_environment
from sglang_hybrid.policies.scout.tuning import FIRST_STEPS
from sglang_hybrid.protocol.messages import Health, Stats, ThreadPlan, encode
from sglang_hybrid.worker.control_client import ControlClient

PROFILE = Path(__file__).parents[2] / "configs/profiles/SmolLM2-135M-Instruct-2048.safetensors"
LONGEST_PAUSE = 2.0  # seconds, on an idle machine
LONGEST_DELAY = 1.5  # seconds by which a fault may delay a step that takes long by itself, on an idle machine
NEW_TOKENS = 28  # of which the worker computes misses
# Budget above the context: everything is attended. The worker computes all blocks but sink and tail, one layer ahead by
# calibrated prediction, so two posts are in flight. Budget below the context: blocks are selected and some are
# resident; the selection must not depend on the rounding of a batch. A row's first steps do not ask the worker then.
ABOVE = (
    "budget_tokens=2048", "recent_blocks=0", "scout.resident_tokens=0", "scout.min_miss_attention=0",
    f"profile={PROFILE}",
)  # fmt: skip
BELOW = ("budget_tokens=256", "scout.resident_tokens=192", "scout.recall_interval=3", "prediction=raw")
SETTINGS = [
    pytest.param(((500, 400, 350, 300), ABOVE), id="short", marks=pytest.mark.full),
    pytest.param(((1000, 850, 700, 550), ABOVE), id="long", marks=pytest.mark.full),
    pytest.param(((1000, 850, 700, 550), BELOW), id="below", marks=pytest.mark.full),
]
STORM_TOKENS = 1024  # tokens of the pool beside the load: aborted requests' pages have to be reused
# The server gets its own small /dev/shm and temporary directory, which a test fills up.
OWN_FILE_SYSTEMS = """
mount -t tmpfs -o size=64m,nr_inodes=1k tmpfs /dev/shm &&
mount -t tmpfs -o size=256k,nr_inodes=64 tmpfs "$TMPDIR" &&
exec "$@"
"""


def busy() -> float:
    """Return the load average per core, at least 1: how much longer than on an idle machine a pause may be."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def may_mount() -> bool:
    probe = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm"]
    return os.geteuid() == 0 and subprocess.run(probe, capture_output=True).returncode == 0


@dataclass
class Faulty:
    """A server, the prompts of its load, and their texts in an undisturbed run."""

    server: Server
    prompts: list[list[int]]
    texts: list[str]
    temporary: Path  # the server's directory for temporary files
    first_steps: int  # steps of a row before it asks the worker
    ended: bool = False

    @property
    def new_tokens(self) -> int:
        return self.first_steps + NEW_TOKENS

    @property
    def scheduler(self) -> psutil.Process:
        worker = self.server.wait_for_worker()
        parent = worker.parent()
        assert parent
        return parent

    def run(self, disturb: Callable[[], None] = lambda: None, longest_pause: float = LONGEST_PAUSE) -> None:
        """Stream all prompts at once and call ``disturb`` when each of them asks the worker.

        Assert that texts equal the undisturbed ones and that no pause between tokens exceeds ``longest_pause`` seconds,
        scaled by ``busy``. A step without a fault takes more than a second on two cores if every batch must have the
        same bits: then a pause may be LONGEST_DELAY longer than the median one.
        """
        begun = threading.Barrier(len(self.prompts) + 1)
        pauses: list[float] = []

        def follow(n: int) -> str:
            text, last = "", 0.0
            for count, so_far in enumerate(self.server.stream(self.prompts[n], self.new_tokens)):
                text = so_far
                if count == 1 + self.first_steps:
                    begun.wait(120)
                elif count > 1:
                    pauses.append(time.monotonic() - last)
                last = time.monotonic()
            return text

        with ThreadPoolExecutor(len(self.prompts)) as pool:
            running = [pool.submit(follow, n) for n in range(len(self.prompts))]
            begun.wait(120)
            disturb()
            texts = [answer.result() for answer in running]
        assert texts == self.texts
        longest = max(longest_pause, statistics.median(pauses) + LONGEST_DELAY)
        assert max(pauses) < longest * busy(), self.server.log_tail(20)

    def holdings(self) -> dict[str, int]:
        """Return counts of what a scheduler process could leak: threads, descriptors, mappings, children."""
        process = self.scheduler
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        return {
            "threads": process.num_threads(),
            "descriptors": process.num_fds(),
            "mailboxes": len(re.findall("memfd:sglang-hybrid-mailbox", maps)),
            "pools": len(re.findall("memfd:sglang-hybrid-kv", maps)),
            "children": len(process.children(recursive=True)),
        }


@pytest.fixture(scope="module", params=SETTINGS)
def faulty(
    request: pytest.FixtureRequest, model: Path, english: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Faulty]:
    lengths, settings = request.param
    first_steps = FIRST_STEPS if settings == BELOW else 0
    log = tmp_path_factory.mktemp("faults") / "server.log"
    tokens = sum(lengths) + len(lengths) * (first_steps + NEW_TOKENS + 32) + STORM_TOKENS
    settings = (*settings, "worker=start", "host_memory=1GiB", "worker_restart_seconds=0.3")
    flags = (
        *(part for setting in settings for part in ("--hybrid", setting)),
        "--enable-metrics", "--max-total-tokens", str(tokens // 32 * 32),
    )  # fmt: skip
    own = tmp_path_factory.mktemp("own")
    prefix = ("unshare", "--mount", "sh", "-c", OWN_FILE_SYSTEMS, "sh") if may_mount() else ()
    prompts = [english[n * 2000 : n * 2000 + length] for n, length in enumerate(lengths)]
    environment, module = {"TMPDIR": str(own)}, "sglang.launch_server"
    if request.param[1] == BELOW:
        environment, module = environment | in_environment([SAME_BITS]), "bench.chaos.server"
    with Server(model, "hybrid", *flags, log=log, environment=environment, prefix=prefix, module=module) as server:
        for ids in prompts:  # prompts enter the radix cache, so that the load is decode
            server.generate(ids, 1)
        texts = [answer["text"] for answer in server.generate_together(prompts, first_steps + NEW_TOKENS)]
        yield Faulty(server, prompts, texts, own, first_steps)


@pytest.fixture(autouse=True)
def nothing_is_leaked(faulty: Faulty) -> Iterator[None]:
    before = faulty.holdings()
    yield
    if faulty.ended:
        return
    # the supervisor may still be cleaning up
    deadline = time.monotonic() + 20
    while faulty.holdings() != before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert faulty.holdings() == before
    assert faulty.server.process.poll() is None


def test_undisturbed_the_worker_serves_every_miss(faulty: Faulty) -> None:
    before = faulty.server.miss_rows()
    faulty.run()
    after = faulty.server.miss_rows()
    # one row per prompt, layer (of 30) and decode step; a few late replies are allowed on a busy machine
    assert after["worker"] - before.get("worker", 0) > 0.9 * len(faulty.prompts) * 30 * (NEW_TOKENS - 1)
    # a post that overwrote one that was not collected yet would be counted here
    assert after.get("process-damaged", 0) == before.get("process-damaged", 0)


def test_an_idle_worker_sleeps(faulty: Faulty) -> None:
    worker = faulty.server.wait_for_worker()
    before, started = worker.cpu_times(), time.monotonic()
    time.sleep(4)  # the idle time that is measured
    after = worker.cpu_times()
    used = after.user + after.system - before.user - before.system
    assert used / (time.monotonic() - started) < 0.01


def test_a_killed_worker_costs_no_token_and_is_replaced(faulty: Faulty) -> None:
    worker = faulty.server.wait_for_worker()
    before = faulty.server.miss_rows()
    faulty.run(worker.kill)
    faulty.server.wait_for_worker(other_than=worker.pid)
    after = faulty.server.miss_rows()
    assert after["process-no-worker"] > before.get("process-no-worker", 0)
    faulty.server.wait_for_log(f"CPU worker {worker.pid} is gone (it was killed by SIGKILL): this process computes")
    faulty.server.wait_for_log("rows were computed in the server process")


def test_a_stopped_worker_is_given_up_and_replaced(faulty: Faulty) -> None:
    worker = faulty.server.wait_for_worker()
    faulty.run(lambda: worker.send_signal(signal.SIGSTOP))
    faulty.server.wait_for_log(f"CPU worker {worker.pid} has not answered for 2.0 s")
    faulty.server.wait_for_worker(other_than=worker.pid)
    assert not worker.is_running()


@pytest.mark.full
def test_a_worker_that_was_only_slow_is_used_again(faulty: Faulty) -> None:
    worker = faulty.server.wait_for_worker()

    def pause() -> None:
        worker.send_signal(signal.SIGSTOP)
        time.sleep(1.0)  # longer than a layer's deadline, shorter than the time after which a worker is given up
        worker.send_signal(signal.SIGCONT)

    faulty.run(pause)
    before = faulty.server.miss_rows()["worker"]
    faulty.run()
    assert faulty.server.miss_rows()["worker"] > before
    current = faulty.server.worker()
    assert current and current.pid == worker.pid


@pytest.mark.full
def test_twenty_crashes_in_a_row_cost_no_token(faulty: Faulty) -> None:
    crashes = 0
    last = 0

    def crash_until(done: threading.Event) -> None:
        nonlocal crashes, last
        while crashes < 20:
            worker = faulty.server.wait_for_worker(other_than=last)
            served = faulty.server.miss_rows()["worker"]
            # without a row from the worker these are workers that die at once, which a server gives up on
            while not done.wait(0.01) and faulty.server.miss_rows()["worker"] == served:
                pass
            if done.is_set():
                return
            worker.kill()
            last = worker.pid
            crashes += 1

    while crashes < 20:
        done = threading.Event()
        crasher = threading.Thread(target=crash_until, args=(done,))
        try:
            faulty.run(crasher.start)
        finally:
            done.set()
            crasher.join()
    faulty.server.wait_for_worker(other_than=last)


def test_a_damaged_reply_is_never_merged(faulty: Faulty) -> None:
    """Replies are damaged by the numbers of other posts, by a wrong generation, and by an unknown status."""
    before = faulty.server.miss_rows()
    with MailboxMemory(faulty.server.wait_for_worker()) as memory:
        done = threading.Event()
        damages = 0

        def damage() -> None:
            nonlocal damages
            while not done.is_set():
                newest = memory.posted()
                for number in (newest + 1000, 1 << 63, newest + 2, 0):
                    memory.write_replies(sequence=number)
                    damages += 1
                memory.write_replies(generation=0xDEAD, sequence=memory.posted())
                memory.write_replies(status=0xBAD, sequence=memory.posted())
                damages += 2
                done.wait(0.002)

        damager = threading.Thread(target=damage)
        try:
            faulty.run(damager.start)
        finally:
            done.set()
            damager.join()
    assert damages > 100
    after = faulty.server.miss_rows()
    assert after.get("process-damaged", 0) > before.get("process-damaged", 0)


@pytest.mark.full
def test_garbage_on_the_control_sockets_changes_nothing(faulty: Faulty) -> None:
    worker = faulty.server.wait_for_worker()
    directory = directory_of(worker)
    chance = random.Random(5)

    def talk() -> None:
        context = zmq.Context()
        talker = context.socket(zmq.DEALER)
        talker.setsockopt(zmq.LINGER, 0)
        talker.connect(f"ipc://{directory}/control.sock")
        for _ in range(200):
            talker.send_multipart([chance.randbytes(chance.randrange(300)) for _ in range(chance.randrange(1, 4))])
        talker.send(encode(ThreadPlan(threads=7)))  # well-formed, but not from the server
        for _ in range(200):
            for name, kind in (("control.sock", socket.SOCK_STREAM), ("regions.sock", socket.SOCK_SEQPACKET)):
                raw = socket.socket(socket.AF_UNIX, kind)
                with contextlib.suppress(OSError), raw:
                    raw.settimeout(1)
                    raw.connect(f"{directory}/{name}")
                    raw.send(chance.randbytes(100))
        context.destroy(linger=0)

    faulty.run(talk)
    current = faulty.server.worker()
    assert current and current.pid == worker.pid
    with ControlClient(directory) as client:
        assert client.ask(Health(), 10).state == "serving"
        before = client.ask(Stats(), 10).posts
        faulty.run()
        assert client.ask(Stats(), 10).posts > before


@pytest.mark.full
@pytest.mark.skipif(not may_mount(), reason="only root can give the server small file systems of its own")
def test_full_file_systems_cost_no_token_and_the_worker_comes_back(faulty: Faulty) -> None:
    worker = faulty.server.wait_for_worker()
    root = Path(f"/proc/{faulty.scheduler.pid}/root")
    places = [root / "dev/shm", root / faulty.temporary.relative_to("/")]

    names = itertools.count()

    def fill() -> None:
        for place in places:
            with contextlib.suppress(OSError), (place / "everything").open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
            with contextlib.suppress(OSError):
                while True:
                    (place / f"file-{next(names)}").touch()

    def fill_and_kill() -> None:
        fill()
        worker.kill()
        deadline = time.monotonic() + 30
        while "the CPU worker could not be started again" not in faulty.server.log.read_text():
            fill()  # also the space that the dead worker's sockets free
            assert time.monotonic() < deadline, faulty.server.log_tail(10)

    try:
        faulty.run(fill_and_kill)
    finally:
        for place in places:
            for file in [place / "everything", *place.glob("file-*")]:
                file.unlink(missing_ok=True)
    faulty.server.wait_for_worker(other_than=worker.pid)


@pytest.mark.full
def test_a_storm_of_aborted_requests_costs_no_token(faulty: Faulty, english: list[int]) -> None:
    """Aborted prompts have more than twice the pool's free tokens, so pages go from one request to another at once."""
    assert sum(100 + n for n in range(24)) > 2 * STORM_TOKENS

    def start_and_drop(n: int) -> None:
        for seen, _ in enumerate(faulty.server.stream(english[20000 + n * 200 :][: 100 + n], 100)):
            if seen >= n % 4:
                return

    def storm() -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(start_and_drop, range(24)))

    faulty.run(storm, longest_pause=30)  # streams pause while prompts of the storm are prefilled
    deadline = time.monotonic() + 30
    while running_requests(faulty.server):
        assert time.monotonic() < deadline, "aborted requests still run"
        time.sleep(0.2)  # no event tells a client that the scheduler is idle


def test_a_killed_server_takes_its_worker_with_it(faulty: Faulty) -> None:
    """Last test for each server: it ends the server."""
    faulty.server.wait_for_worker()
    family = faulty.server.family()
    faulty.ended = True
    faulty.server.own_process.kill()
    faulty.server.own_process.wait(30)
    _gone, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, [(process.pid, process.cmdline()) for process in alive]


# -- helpers -----------------------------------------------------------------------------------


def directory_of(worker: psutil.Process) -> Path:
    """Return the worker's directory, by a path that also works if the server has its own file systems."""
    arguments = worker.cmdline()
    return Path(f"/proc/{worker.pid}/root" + arguments[arguments.index("--dir") + 1])


def running_requests(server: Server) -> int:
    load = requests.get(f"{server.url}/v1/loads", timeout=30).json()["loads"][0]
    return int(load["num_running_reqs"])
