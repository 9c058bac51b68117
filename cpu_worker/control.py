"""The worker's event loop, in one thread: handles control messages, descriptors, the end of the parent, and signals.

A request that is malformed, out of range or not possible now is answered with ``Failed`` (see ``protocol.messages``).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time

import zmq

from cpu_worker.logs import LimitedLog
from cpu_worker.parent import Parent
from cpu_worker.providers import ProviderError
from cpu_worker.regions import DescriptorSocket, RegionError
from cpu_worker.session import Session, SessionError
from cpu_worker.wakes import Wakes
from sglang_hybrid import __version__
from sglang_hybrid.ops.cpu.library import NativeError, variants
from sglang_hybrid.ops.cpu.structs import MAILBOX_VERSION
from sglang_hybrid.protocol import messages
from sglang_hybrid.protocol.cores import CoresError
from sglang_hybrid.protocol.directory import DirectoryError, WorkerDirectory
from sglang_hybrid.protocol.messages import (
    Answer,
    Attach,
    Done,
    Drain,
    Failed,
    Health,
    HealthReport,
    Hello,
    Request,
    Stats,
    Stop,
    ThreadPlan,
    WarmUp,
    Welcome,
)

_LOOK_MS = 250  # interval of looking for the end of the parent where the system has no pidfds
_DRAIN_S = 2.0
_LAST_ANSWER_MS = 500  # time to send the answer to a stop
_MESSAGES_AT_ONCE = 64  # messages that are answered before other descriptors are handled
_LONGEST_REASON = 1000

log = logging.getLogger(__name__)


class ControlServer:
    """Server of the worker's directory ``place``. ``run`` ends on a stop request, a signal, or the end of the parent.

    ``run`` also ends when the provider fails, and, if there is a parent, when the client closes its connection. Use
    this class as a context manager, which removes what it created in the directory.
    """

    def __init__(self, place: WorkerDirectory, parent: Parent | None, wakes: Wakes) -> None:
        """Lock the directory and create its sockets.

        Raise DirectoryError if others can access the directory, another worker uses it, or a socket cannot be made.
        """
        self._parent, self._wakes = parent, wakes
        self._started = time.monotonic()
        self._session: Session | None = None
        self._mistakes = LimitedLog(log)
        self._ending: str | None = None  # why this worker ends, once that is decided
        self._failure: str | None = None  # why the provider failed
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, _lock(place))
            self._regions = stack.enter_context(contextlib.closing(_listen(place)))
            self._control = _bind(place, stack)
            stack.callback(self._detach)
            self._stack = stack.pop_all()

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> int:
        """Serve until the worker has to end. Return the exit status: 1 if the provider failed, otherwise 0."""
        while self._ending is None:
            self._wait()
            if not self._interrupted():
                self._serve_regions()
                self._answer_messages()
                self._watch_client()
        log.log(logging.ERROR if self._failure else logging.INFO, "ending: %s", self._ending)
        self._detach()
        return 1 if self._failure else 0

    # -- waiting ---------------------------------------------------------------------------------

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        for fd in (self._wakes.fd, *self._regions.descriptors()):
            poller.register(fd, zmq.POLLIN)
        if self._session is not None:
            poller.register(self._session.offer.connection.fileno(), zmq.POLLIN)
        if self._parent is not None and self._parent.fd is not None:
            poller.register(self._parent.fd, zmq.POLLIN)
        must_look = self._parent is not None and self._parent.fd is None
        poller.poll(_LOOK_MS if must_look else None)

    def _interrupted(self) -> bool:
        """Return True if this worker has to end, so that long operations can end early. May be called by any thread."""
        if name := self._wakes.read():
            self._ending = f"received {name}"
        elif self._failure is not None:
            self._ending = self._failure
        elif self._parent is not None and self._parent.is_gone():
            self._ending = f"process {self._parent.pid} is gone"
        return self._ending is not None

    def _provider_failed(self, reason: str) -> None:
        """Make the event loop end with ``reason``. Called by a thread of the provider."""
        self._failure = reason
        self._wakes.wake()

    # -- regions ---------------------------------------------------------------------------------

    def _serve_regions(self) -> None:
        for problem in self._regions.serve():
            self._mistakes.warning(problem)

    def _watch_client(self) -> None:
        """Detach if the client's connection has ended. A client that sends anything over it is detached too."""
        if self._session is None:
            return
        try:
            self._session.offer.receive()
        except RegionError as error:
            log.info("the server let go (%s)", error)
            self._detach()
            if self._parent is not None:
                self._ending = "its server is gone"

    def _detach(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    # -- messages --------------------------------------------------------------------------------

    def _answer_messages(self) -> None:
        for _ in range(_MESSAGES_AT_ONCE):
            try:
                identity, *frames = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._watch_client()  # a client that closed its connection before this request has detached
            answer = self._answer_frames(identity, frames)
            with contextlib.suppress(zmq.ZMQError):  # the client is gone
                self._control.send_multipart([identity, messages.encode(answer)], zmq.NOBLOCK)
            if self._ending is not None:
                return

    def _answer_frames(self, identity: bytes, frames: list[bytes]) -> Answer:
        try:
            if len(frames) != 1:
                raise messages.ProtocolError(f"a message of {len(frames)} frames instead of one")
            return self._answer(identity[: messages.CLIENT_ID_BYTES], messages.decode_request(frames[0]))
        except (
            messages.ProtocolError, CoresError, ProviderError, NativeError, RegionError, SessionError, OSError,
        ) as error:  # fmt: skip
            reason = str(error)[:_LONGEST_REASON]
            self._mistakes.warning(f"refused: {reason}")
            return Failed(reason=reason)

    def _answer(self, client: bytes, request: Request) -> Answer:
        match request:
            case Hello():
                return Welcome(
                    version=__version__,
                    pid=os.getpid(),
                    mailbox_version=MAILBOX_VERSION,
                    variants=variants(),
                    attached=self._session is not None,
                )
            case Health():
                return self._health()
            case Attach(token=token):
                self._attach(client, token)
            case ThreadPlan():
                planned = self._session_of(client, "plan").plan(request)
                bound = f"on cores {','.join(map(str, planned.cores))}" if planned.cores else "not bound to cores"
                log.info("computing: %s (%s), %d threads %s", planned.provider, planned.variant, planned.threads, bound)
                return planned
            case WarmUp():
                self._session_of(client, "warm-up").warm_up(self._interrupted)
            case Stats():
                return self._session_of(None, "stats").stats()
            case Drain():
                self._drain(self._session_of(client, "drain"))
            case Stop():
                if self._session is not None:
                    self._drain(self._session_of(client, "stop"))
                self._control.setsockopt(zmq.LINGER, _LAST_ANSWER_MS)
                self._ending = "told to stop"
        return Done()

    def _health(self) -> HealthReport:
        session = self._session
        return HealthReport(
            state="idle" if session is None else "serving" if session.serving else "attached",
            uptime_s=time.monotonic() - self._started,
            completed=0 if session is None else session.completed,
        )

    def _attach(self, client: bytes, token: str) -> None:
        self._serve_regions()  # the descriptors were sent before the message, but may not have been read yet
        if self._session is not None:
            if client == self._session.owner:
                raise SessionError("regions are attached already, send drain first")
            raise SessionError("this worker serves another server; give each server a worker of its own")
        if self._ending is not None:
            raise SessionError(f"this worker is ending: {self._ending}")
        offer = self._regions.find(token)
        if offer is None:
            raise SessionError("no regions came over the descriptor socket with that token")
        self._regions.take(offer)
        try:
            self._session = Session(offer, client, self._provider_failed)
        except BaseException:
            offer.close()
            raise
        shape = self._session.geometry
        log.info("attached: %d layers, %d KV heads, %d pages", shape.layers, shape.kv_heads, shape.pages)

    def _session_of(self, client: bytes | None, request: str) -> Session:
        """Return the session. Raise SessionError without one, or if ``client`` (None: any client) did not attach it."""
        if self._session is None:
            raise SessionError(f"{request} needs attached regions, send attach first")
        if client is not None and client != self._session.owner:
            raise SessionError(f"{request} is for the server that attached, and this worker serves another one")
        return self._session

    def _drain(self, session: Session) -> None:
        if not session.drain(_DRAIN_S):
            log.warning("not all posts could be answered within %g s", _DRAIN_S)
        self._detach()


def _lock(place: WorkerDirectory) -> int:
    """Lock the directory and return its descriptor. Raise DirectoryError if another worker holds the lock.

    A lock on the directory leaves no file behind, and the kernel frees it when the process ends.
    """
    place.check()
    fd = os.open(place.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in (place.control, place.regions):
            # sockets of a worker that was killed
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(path.lstat().st_mode):
                    raise DirectoryError(f"{path} is in the way: a worker needs that name for a socket")
                path.unlink()
    except BlockingIOError:
        os.close(fd)
        raise DirectoryError(f"another worker is alive in {place.path}: stop it, or use another directory") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _listen(place: WorkerDirectory) -> DescriptorSocket:
    try:
        return DescriptorSocket(place.regions)
    except OSError as error:
        raise DirectoryError(f"no socket can be made in {place.path}: {error.strerror}") from error


def _bind(place: WorkerDirectory, stack: contextlib.ExitStack) -> zmq.Socket[bytes]:
    context = zmq.Context()
    stack.callback(context.term)
    control = context.socket(zmq.ROUTER)
    # ZMQ may unlink the socket only after close returned, so it is unlinked here, unless it is gone already
    stack.callback(place.control.unlink, missing_ok=True)
    stack.callback(control.close)
    control.setsockopt(zmq.LINGER, 0)
    control.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
    try:
        control.bind(place.control_address)
    except zmq.ZMQError as error:
        raise DirectoryError(f"no socket can be made in {place.path}: {error}") from error
    return control
