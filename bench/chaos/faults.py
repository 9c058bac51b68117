"""Faults of a chaos run. Each returns a description of what it did, or None if its victim was already gone."""

from __future__ import annotations

import contextlib
import itertools
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import requests

from bench.chaos.mailbox_memory import MailboxMemory
from bench.chaos.target import Target, TargetError

Fault = Callable[[Target, random.Random], str | None]
_names = itertools.count()


def worker_faults() -> dict[str, tuple[int, Fault]]:
    """Return name -> (relative frequency, fault) of the faults of the CPU worker."""
    return {
        "worker killed": (4, lambda t, c: _signal_worker(t, signal.SIGKILL)),
        "worker crashed": (2, lambda t, c: _signal_worker(t, signal.SIGSEGV)),
        "real-time signal to worker": (1, lambda t, c: _signal_worker(t, signal.SIGRTMIN + c.randrange(10))),
        "real-time signal to worker's helper thread": (1, _signal_thread),
        "worker killed while it starts": (3, _kill_beginner),
        "worker stopped": (4, _stop_worker),
    }


def _mailbox_faults() -> dict[str, tuple[int, Fault]]:
    return {
        "bits flipped": (6, _flip_bits),
        "stale replies": (3, _stale_replies),
        "future replies": (4, _foretell),
        "wrong generations": (4, _wrong_generations),
        "wrong statuses": (2, _wrong_statuses),
        "no memory left for the worker": (2, _limit_worker_memory),
    }


def all_faults(target: Target) -> dict[str, tuple[int, Fault]]:
    """Return name -> (relative frequency, fault) of all faults of this server; some policies have no worker."""
    table: dict[str, tuple[int, Fault]] = worker_faults() | _mailbox_faults() if target.has_worker else {}
    table |= {
        "scheduler stopped": (2, _stop_scheduler),
        "no descriptors left": (2, _limit_descriptors),
        "cache flushed": (1, lambda t, c: f"flushed: {t.flush()}"),
        "generation paused": (2, _pause),
        "weights updated": (2, _update_weights),
    }
    if target.own_file_systems:
        table["file systems full"] = (2, _fill_file_systems)
    return table


# -- signals -----------------------------------------------------------------------------------


def _signal_worker(target: Target, number: int) -> str | None:
    worker = target.serving_worker()
    if not worker:
        return None
    worker.send_signal(number)
    return f"worker {worker.pid} got signal {number}"


def _signal_thread(target: Target, chance: random.Random) -> str | None:
    """Send a signal to one thread of the worker, as a profiler or a debugger does."""
    worker = target.serving_worker()
    if not worker:
        return None
    thread = chance.choice(worker.threads()).id
    psutil.Process(thread).send_signal(signal.SIGRTMIN + 7)
    return f"thread {thread} of worker {worker.pid}"


def _kill_beginner(target: Target, chance: random.Random) -> str | None:
    """Kill the worker, then the worker that replaces it: before, during or after its hello."""
    beginner = _successor(target)
    if not beginner:
        return None
    time.sleep(chance.random())
    beginner.kill()
    return f"worker {beginner.pid}"


@contextlib.contextmanager
def without_worker(target: Target) -> Iterator[None]:
    """Leave the server without a worker: kill the serving one and stop the next one before its hello.

    The server waits a minute for the hello.
    """
    beginner = _successor(target)
    if not beginner:
        raise TargetError(f"no worker took the place of the killed one:\n{target.log_tail()}")
    with _stopped(beginner):
        yield
        if target.serving_worker():
            raise TargetError(f"a worker served while there should be none:\n{target.log_tail()}")


def _successor(target: Target) -> psutil.Process | None:
    """Kill the serving worker and return the process that replaces it, once it is started; None after 10 s."""
    serving = target.serving_worker()
    if serving:
        serving.kill()
    before = {serving.pid} if serving else set()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for worker in target.workers():
            if worker.pid not in before:
                return worker
        time.sleep(0.02)
    return None


def _stop_worker(target: Target, chance: random.Random) -> str | None:
    worker = target.serving_worker()
    if not worker:
        return None
    seconds = chance.uniform(0.1, 5.0)
    with _stopped(worker):
        time.sleep(seconds)
    return f"worker {worker.pid} for {seconds:.1f} s"


def _stop_scheduler(target: Target, chance: random.Random) -> str | None:
    seconds = chance.uniform(0.1, 2.0)
    with _stopped(target.scheduler()):
        time.sleep(seconds)
    return f"for {seconds:.1f} s"


@contextlib.contextmanager
def _stopped(*processes: psutil.Process) -> Iterator[None]:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


# -- the mailbox -------------------------------------------------------------------------------


@contextlib.contextmanager
def _mailbox(target: Target) -> Iterator[MailboxMemory | None]:
    """Yield the worker's mailbox while neither side runs; None if no worker serves.

    What is written then is there when the next side reads, and no forgery is perfect.
    """
    worker = target.serving_worker()
    if not worker:
        yield None
        return
    with _stopped(target.scheduler(), worker), MailboxMemory(worker) as memory:
        yield memory


def _flip_bits(target: Target, chance: random.Random) -> str | None:
    with _mailbox(target) as memory:
        if memory is None:
            return None
        return ", ".join(memory.flip_bit(chance) for _ in range(chance.randrange(1, 9)))


def _stale_replies(target: Target, chance: random.Random) -> str | None:
    """Mark all replies in the mailbox as replies to an earlier post."""
    distance = 2 * chance.randrange(1, 5)
    with _mailbox(target) as memory:
        if memory is None:
            return None
        memory.write_replies(generation=memory.generation(), status=0, sequence=max(0, memory.posted() - distance))
        return f"of the post {distance} before the newest"


def _foretell(target: Target, chance: random.Random) -> str | None:
    """Write replies to the next post before it is posted, repeatedly, so that some of them would match it.

    The worker continues a little later than the server, so the server reads the forged reply and not the answer.
    """
    worker = target.serving_worker()
    if not worker:
        return None
    for _ in range(chance.randrange(1, 20)):
        with _stopped(worker):
            with _stopped(target.scheduler()), MailboxMemory(worker) as memory:
                memory.foretell_replies()
            time.sleep(chance.uniform(0.01, 0.1))
        time.sleep(chance.uniform(0.01, 0.1))
    return "of the next post"


def _wrong_generations(target: Target, chance: random.Random) -> str | None:
    with _mailbox(target) as memory:
        if memory is None:
            return None
        memory.forge_replies(generation=chance.randrange(1 << 31, 1 << 32))
        return "of the newest post"


def _wrong_statuses(target: Target, chance: random.Random) -> str | None:
    with _mailbox(target) as memory:
        if memory is None:
            return None
        memory.forge_replies(status=chance.randrange(3, 1 << 32))
        return "of the newest post"


# -- resources ---------------------------------------------------------------------------------


def _limit_descriptors(target: Target, chance: random.Random) -> str | None:
    """Kill the worker, and for a while leave the server no file descriptors to start another."""
    scheduler, worker = target.scheduler(), target.serving_worker()
    before = scheduler.rlimit(resource.RLIMIT_NOFILE)
    try:
        scheduler.rlimit(resource.RLIMIT_NOFILE, (scheduler.num_fds(), before[1]))
        if worker:
            worker.kill()
        time.sleep(chance.uniform(0.5, 3.0))
    finally:
        scheduler.rlimit(resource.RLIMIT_NOFILE, before)
    return f"{before[0]} -> {scheduler.num_fds()}"


def _limit_worker_memory(target: Target, chance: random.Random) -> str | None:
    worker = target.serving_worker()
    if not worker:
        return None
    worker.rlimit(resource.RLIMIT_AS, (worker.memory_info().vms, resource.RLIM_INFINITY))
    return f"worker {worker.pid}"


def _fill_file_systems(target: Target, chance: random.Random) -> str | None:
    root = Path(f"/proc/{target.scheduler().pid}/root")
    places = [root / "dev/shm", root / target.temporary.relative_to("/")]
    made: list[Path] = []

    def fill() -> None:
        for place in places:
            with contextlib.suppress(OSError):
                made.append(place / f"chaos-{next(_names)}")
                with made[-1].open("wb") as file:
                    while True:
                        file.write(bytes(1 << 16))
            with contextlib.suppress(OSError):
                while True:
                    made.append(place / f"chaos-{next(_names)}")
                    made[-1].touch()

    try:
        fill()
        if worker := target.serving_worker():
            worker.kill()
        ends = time.monotonic() + chance.uniform(0.5, 3.0)
        while time.monotonic() < ends:
            fill()  # also the space that the dead worker's sockets free
            time.sleep(0.05)
    finally:
        for file in made:
            with contextlib.suppress(OSError):
                file.unlink()
    return f"{len(made)} files"


# -- SGLang's own commands ---------------------------------------------------------------------


def _pause(target: Target, chance: random.Random) -> str | None:
    mode = chance.choice(("in_place", "retract"))
    with _paused(target, mode):
        time.sleep(chance.uniform(0.05, 1.0))
        if mode == "retract" and chance.random() < 0.5:
            target.flush()
    return mode


def _update_weights(target: Target, chance: random.Random) -> str | None:
    """Load the same weights again, between two steps of running requests."""
    with _paused(target, "in_place"):
        body: dict[str, Any] = {"model_path": str(target.model), "flush_cache": False}
        reply = requests.post(f"{target.url}/update_weights_from_disk", json=body, timeout=120)
    return None if not reply.ok else "from disk"


@contextlib.contextmanager
def _paused(target: Target, mode: str) -> Iterator[None]:
    requests.post(f"{target.url}/pause_generation", json={"mode": mode}, timeout=60).raise_for_status()
    try:
        yield
    finally:
        requests.post(f"{target.url}/continue_generation", json={}, timeout=60).raise_for_status()
