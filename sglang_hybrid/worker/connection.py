"""One life of a worker, from the scheduler's point of view."""

from __future__ import annotations

import ctypes
import logging
import secrets
import socket
import threading
import time
from pathlib import Path

from sglang_hybrid.ops.cpu.structs import Geometry
from sglang_hybrid.protocol.mailbox import Mailbox
from sglang_hybrid.protocol.messages import Attach, Hello, Stop, ThreadPlan, WarmUp
from sglang_hybrid.worker.control_client import ControlClient, ControlError
from sglang_hybrid.worker.process import WorkerProcess

logger = logging.getLogger("sglang.srt.hybrid")

START_SECONDS = 60.0  # provider torch imports torch
_PLAN_SECONDS = 60.0
_STOP_SECONDS = 1.0
_LONGEST_LOOK = 0.5
_LONGEST_LIFE_WAIT = 0.25


class WorkerConnection:
    """An attached worker with a mailbox of its own.

    The data plane (one thread) uses ``mailbox`` and ``gone``; everything else belongs to the
    thread that made the link. The mailbox's memory lives as long as somebody holds the link, so
    ``close`` may be called while the data plane still waits for a reply.
    """

    def __init__(
        self,
        place: Path | WorkerProcess,
        geometry: Geometry,
        pool_fd: int,
        plan: ThreadPlan,
        interrupt_fd: int | None = None,
    ) -> None:
        """Connect, attach, plan, warm up. Raises ControlError, RegionError or NativeError; then nothing is left open.

        ``place`` is the directory of a running worker, or a process that was just started and
        belongs to the link from here on. When ``interrupt_fd`` becomes readable, a running worker is
        no longer waited for.
        """
        self.process = place if isinstance(place, WorkerProcess) else None
        self.gone = ctypes.c_uint32(0)  # not 0 once the worker is given up
        self.late = False  # the data plane's note: the newest post was not answered in time
        self._mailbox: Mailbox | None = None
        self._connection: socket.socket | None = None
        self._control: ControlClient | None = None
        self._life: threading.Thread | None = None
        try:
            self._control = ControlClient(self.process.directory if self.process else Path(str(place)))
            no_more = self.process.pidfd if self.process else interrupt_fd
            self.pid = self._control.ask(Hello(), START_SECONDS, no_more).pid
            self.mailbox = self._mailbox = Mailbox(geometry)
            token = secrets.token_hex(16)
            self._connection = self._control.send_regions(token, self.mailbox.region.fd, pool_fd)
            self.mailbox.region.close()  # the worker has its own descriptor, and the mapping stays
            self._control.ask(Attach(token=token), _PLAN_SECONDS, self._connection)
            self.planned = self._control.ask(plan, _PLAN_SECONDS, self._connection)
            self._control.ask(WarmUp(), _PLAN_SECONDS, self._connection)
            self.connection = self._connection
        except BaseException:
            self.close()
            raise
        if self.planned.provider == "native":
            self._follow_life()
        self.since = time.monotonic()
        self._heartbeat = self.mailbox.heartbeat
        self._looked = self.since
        self._silent = 0.0

    def silent_seconds(self) -> float:
        """How long the worker's heart has not been beating, as far as that was looked at.

        Time in which nobody looked counts little: if this process did not get to run, the worker
        may not have either (a suspended or overloaded machine).
        """
        heartbeat, now = self.mailbox.heartbeat, time.monotonic()
        self._silent = self._silent + min(now - self._looked, _LONGEST_LOOK) if heartbeat == self._heartbeat else 0.0
        self._heartbeat, self._looked = heartbeat, now
        return self._silent

    def _follow_life(self) -> None:
        """Give the worker up the moment it dies: the end of its connection comes when all its memory is given back."""

        def follow() -> None:
            while not self.gone.value:
                if self.mailbox.wait_for_end(_LONGEST_LIFE_WAIT):
                    self.give_up()

        self._life = threading.Thread(target=follow, name="hybrid-worker-life", daemon=True)
        try:
            self._life.start()
        except RuntimeError as error:  # no thread to be had: the end of the connection tells it, later
            logger.warning("a worker that dies will be noticed late: %s", error)
            self._life = None

    def give_up(self) -> None:
        """The data plane stops waiting for this worker, at once. ``close`` follows."""
        self.gone.value = 1
        if self._mailbox:
            self._mailbox.give_up()

    def close(self, stop: bool = False) -> str:
        """Give the worker up: the data plane stops waiting, a process of ours ends. How it ended, in words.

        ``stop`` asks it to first. One that has not ended by then is terminated, and killed if it does not react.
        """
        self.give_up()
        if stop and self._control and self.process:
            try:
                self._control.ask(Stop(), _STOP_SECONDS, self.process.pidfd)
            except ControlError as error:
                logger.debug("the worker did not stop by itself: %s", error)
        if self._mailbox:
            self._mailbox.region.close()
        if self._connection:
            self._connection.close()
        if self._control:
            self._control.close()
        ended = self.process.end() if self.process else "let go of this server"
        if self._life:
            self._life.join()
        return ended
