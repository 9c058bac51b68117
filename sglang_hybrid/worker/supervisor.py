"""Supervisor of the CPU worker: attaches a worker at start, and another one whenever the worker dies or hangs."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hybrid.ops.cpu import NativeError
from sglang_hybrid.ops.cpu.structs import Geometry
from sglang_hybrid.protocol.cores import format_cpus
from sglang_hybrid.protocol.messages import ThreadPlan
from sglang_hybrid.protocol.region import RegionError
from sglang_hybrid.worker.connection import WorkerConnection
from sglang_hybrid.worker.control_client import ControlError
from sglang_hybrid.worker.process import WorkerProcess, remove_leftovers

logger = logging.getLogger("sglang.srt.hybrid")

_LOOK_SECONDS = 0.25
_FIRST_PAUSE_SECONDS = 0.1
_STEADY_SECONDS = 30.0  # a worker that lived this long did not die because of its start
_CRASHES, _CRASH_SECONDS = 10, 60.0  # give up after this many workers in a row died within this time without an answer

_CONNECT_ERRORS = (ControlError, RegionError, NativeError, OSError)


class WorkerError(RuntimeError):
    """No worker can be attached at start. The message says why."""


@dataclass(frozen=True)
class WorkerSettings:
    directory: Path | None  # directory of a worker started by hand; None: this process starts its own worker
    plan: ThreadPlan
    longest_pause_s: float  # longest pause before a dead worker is started again
    silence_s: float  # a worker without a heartbeat for this long is given up


class Supervisor:
    """Owner of the worker. ``link`` is the connection that the data plane may use now, None without a worker."""

    def __init__(self, settings: WorkerSettings, geometry: Geometry, pool_fd: int) -> None:
        self._settings = settings
        self._geometry = geometry
        self._pool_fd = pool_fd
        self.link: WorkerConnection | None = None
        self.restarts = 0
        self._ends: deque[float] = deque(maxlen=_CRASHES)  # times at which workers were lost that had answered nothing
        self.on_change: Callable[[bool], None] = lambda up: None  # called with whether a worker is attached
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="hybrid-worker-watch", daemon=True)

    def start(self) -> None:
        """Attach the first worker and start the thread that watches it. Raise WorkerError if this fails."""
        remove_leftovers()
        try:
            self.link = self._connect()
        except _CONNECT_ERRORS as error:
            raise WorkerError(f"the CPU worker cannot be used: {error}") from error
        self._tell("serves", self.link)
        self._thread.start()

    def stop(self) -> None:
        """End the watching thread and the worker."""
        self._stopping = True
        os.write(self._stop_write, b".")
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def describe(self) -> dict[str, Any]:
        """Return a description of the worker that is attached now, for display."""
        link = self.link
        if link is None:
            return {"attached": False, "restarts": self.restarts}
        planned = link.planned
        return {
            "attached": True,
            "pid": link.pid,
            "provider": planned.provider,
            "variant": planned.variant,
            "threads": planned.threads,
            "cores": list(planned.cores),
            "restarts": self.restarts,
        }

    def _connect(self) -> WorkerConnection:
        place = self._settings.directory or WorkerProcess()
        return WorkerConnection(place, self._geometry, self._pool_fd, self._settings.plan, self._stop_read)

    def _run(self) -> None:
        pause = first = min(_FIRST_PAUSE_SECONDS, self._settings.longest_pause_s)
        while not self._stopping:
            try:
                if self.link:
                    why = self._watch(self.link)
                    if time.monotonic() - self.link.since > _STEADY_SECONDS:
                        pause = first
                    self._give_up(self.link, why, pause)
                if self._crashes_too_often() or self._sleep(pause):
                    break
                pause = min(2 * pause, self._settings.longest_pause_s)
                self._connect_again(pause)
            except Exception:
                # whatever the cause (no thread, no descriptor, no memory): the watching thread must survive it
                logger.exception("the watch over the CPU worker failed, and goes on in %.1f s", pause)
                self._sleep(pause)
        last, self.link = self.link, None
        if last:
            last.close(stop=True)

    def _connect_again(self, pause: float) -> None:
        try:
            link = self._connect()
        except _CONNECT_ERRORS as error:
            logger.warning("the CPU worker could not be started again: %s; next try in %.1f s", error, pause)
            return
        self.restarts += 1
        self.link = link
        self._tell(f"serves again (restart {self.restarts})", link)

    def _crashes_too_often(self) -> bool:
        """Return True if restarts should end: each one costs time, and this process computes the misses anyway."""
        if len(self._ends) < _CRASHES or self._ends[-1] - self._ends[0] > _CRASH_SECONDS:
            return False
        logger.error(
            "%d CPU workers in a row were lost within %.0f s and answered nothing: no other one is started, and this "
            "process computes their attention until the server is started again. What they died of stands above",
            _CRASHES, self._ends[-1] - self._ends[0],
        )  # fmt: skip
        return True

    def _watch(self, link: WorkerConnection) -> str:
        """Wait until the worker is gone or hangs. Return which, in words, or an empty text when ``stop`` is called."""
        while True:
            ready = _readable(_LOOK_SECONDS, link.connection.fileno(), self._stop_read)
            if self._stopping:
                return ""
            if ready:  # a worker never sends data, so this is the end of the connection
                return "is gone"
            if link.silent_seconds() > self._settings.silence_s:
                return f"has not answered for {self._settings.silence_s:.1f} s"

    def _give_up(self, link: WorkerConnection, why: str, pause: float) -> None:
        self.link = None
        link.give_up()  # before anything that takes time: a GPU may be waiting
        if self._stopping:
            link.close(stop=True)
            return
        if link.mailbox.completed:
            self._ends.clear()
        else:
            self._ends.append(time.monotonic())
        self.on_change(False)
        if why != "is gone" and link.process:
            link.process.kill()
        ended = link.close()
        logger.warning(
            "CPU worker %d %s (it %s): this process computes its attention, %s in %.1f s",
            link.pid, why, ended, "a new worker starts" if link.process else "it is looked for again", pause,
        )  # fmt: skip

    def _tell(self, does: str, link: WorkerConnection) -> None:
        self.on_change(True)
        planned = link.planned
        logger.info(
            "CPU worker %d %s: provider %s (%s), %d threads in groups of %d, %s%s",
            link.pid, does, planned.provider, planned.variant, planned.threads, planned.group_threads,
            f"on cores {','.join(map(str, planned.cores))}" if planned.cores else "not bound to cores",
            f"; other workers have CPUs {format_cpus(planned.taken)}" if planned.taken else "",
        )  # fmt: skip
        if twice := set(planned.cores).intersection(planned.taken):
            logger.warning(
                "another worker is bound to CPUs %s too, which slows both: give each server cores of its own "
                "(worker_cores)", format_cpus(twice),
            )  # fmt: skip

    def _sleep(self, seconds: float) -> bool:
        """Sleep for ``seconds``, or until ``stop`` is called. Return True if ``stop`` was called."""
        _readable(seconds, self._stop_read)
        return self._stopping


def _readable(seconds: float, *descriptors: int) -> bool:
    """Return True if a descriptor becomes readable in time. Uses poll: select fails for numbers above 1023."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
