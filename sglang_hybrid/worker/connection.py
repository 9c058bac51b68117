"""Connection to one worker process, from the scheduler's side: control, mailbox, and detection of its end."""

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

START_SECONDS = 60.0  # includes an import of torch by provider torch
_PLAN_SECONDS = 60.0
_STOP_SECONDS = 1.0
_LONGEST_LOOK = 0.5  # seconds that count at most between two looks at the heartbeat
_LONGEST_LIFE_WAIT = 0.25


class WorkerConnection:
    """An attached worker with a mailbox of its own.

    The data plane (one thread) uses ``mailbox``, ``gone`` and ``late``. Everything else belongs to the thread that
    created this object. The mailbox's memory stays as long as a reference to this object exists, so ``close`` may be
    called while the data plane still waits for a reply.
    """

    def __init__(
        self,
        place: Path | WorkerProcess,
        geometry: Geometry,
        pool_fd: int,
        plan: ThreadPlan,
        interrupt_fd: int | None = None,
    ) -> None:
        """Connect to a worker, attach the regions, send the plan, and warm up.

        ``place`` is the directory of a running worker, or a process that was just started and that this object owns
        from now on. When ``interrupt_fd`` becomes readable, the first wait for a running worker ends.
        Raise ControlError, RegionError or NativeError; then nothing is left open.
        """
        self.process = place if isinstance(place, WorkerProcess) else None
        self.gone = ctypes.c_uint32(0)  # not 0 once the worker was given up
        self.late = False  # set by the data plane: the newest post was not answered in time
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
        """Return the seconds without a change of the heartbeat, counting at most ``_LONGEST_LOOK`` per call.

        Longer gaps between calls do not count in full: if this process did not run, the worker may not have run either
        (on a suspended or overloaded machine).
        """
        heartbeat, now = self.mailbox.heartbeat, time.monotonic()
        self._silent = self._silent + min(now - self._looked, _LONGEST_LOOK) if heartbeat == self._heartbeat else 0.0
        self._heartbeat, self._looked = heartbeat, now
        return self._silent

    def _follow_life(self) -> None:
        """Give the worker up as soon as it dies. Its connection ends later, when all memory of its process is freed."""

        def follow() -> None:
            while not self.gone.value:
                if self.mailbox.wait_for_end(_LONGEST_LIFE_WAIT):
                    self.give_up()

        self._life = threading.Thread(target=follow, name="hybrid-worker-life", daemon=True)
        try:
            self._life.start()
        except RuntimeError as error:  # no thread can be started: the end of the connection is noticed instead, later
            logger.warning("a worker that dies will be noticed late: %s", error)
            self._life = None

    def give_up(self) -> None:
        """Make the data plane stop waiting for this worker at once. The owner must still call ``close``."""
        self.gone.value = 1
        if self._mailbox:
            self._mailbox.give_up()

    def close(self, stop: bool = False) -> str:
        """Give the worker up and end its process, if this process started it. Return how the worker ended, in words.

        With ``stop``, the worker is asked to stop first. A process that still runs then is terminated, and killed if it
        does not react.
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
