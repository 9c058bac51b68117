"""The scheduler's side of the control plane: sends requests to the worker, and hands the shared regions to it."""

from __future__ import annotations

import math
import os
import secrets
import socket
import struct
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import overload

import zmq

from sglang_hybrid.protocol import messages
from sglang_hybrid.protocol.directory import DirectoryError, WorkerDirectory
from sglang_hybrid.protocol.messages import (
    CLIENT_ID_BYTES,
    Answer,
    Attach,
    Done,
    Drain,
    Failed,
    Health,
    HealthReport,
    Hello,
    Planned,
    Request,
    Stats,
    StatsReport,
    Stop,
    ThreadPlan,
    WarmUp,
    Welcome,
)

_RECONNECT_MS = 20
_LAST_ANSWER_MS = 100  # a worker that is told to stop answers and ends: its answer may still be under way
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
_TIME = struct.Struct("2l")  # struct timeval

_ANSWERS: dict[type[Request], type[Answer]] = {
    Hello: Welcome,
    Attach: Done,
    ThreadPlan: Planned,
    WarmUp: Done,
    Health: HealthReport,
    Stats: StatsReport,
    Drain: Done,
    Stop: Done,
}


class ControlError(RuntimeError):
    """The worker refused a request, or its answer cannot be used. The message says why."""


class ControlTimeout(ControlError):
    """No answer came: the worker does not run, is busy, or has ended. The request may still be carried out."""


class ControlClient:
    """Client of the worker in ``directory``. A request waits, up to its timeout, for a worker that is not up yet.

    Threads may share a client: their requests are sent one after the other. After any error the client can be used
    again. A request without an answer closes its socket, so a late answer is dropped and never taken for the answer to
    another request.
    """

    def __init__(self, directory: str | Path) -> None:
        """Create a client without connecting. Raise ControlError if the directory's path is too long for a socket."""
        try:
            self.place = WorkerDirectory.at(directory)
        except DirectoryError as error:
            raise ControlError(str(error)) from error
        # Prefix of the routing ids of this client's sockets, by which the worker knows the client. ZMQ reserves ids
        # that begin with 0.
        self._id = b"c" + secrets.token_bytes(CLIENT_ID_BYTES - 1)
        self._sockets = 0
        # the context of the whole process: each context has its own threads, and fails where no thread is left
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket: zmq.Socket[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    @overload
    def ask(self, request: Hello, timeout_s: float, gone: int | socket.socket | None = None) -> Welcome: ...
    @overload
    def ask(self, request: ThreadPlan, timeout_s: float, gone: int | socket.socket | None = None) -> Planned: ...
    @overload
    def ask(self, request: Health, timeout_s: float, gone: int | socket.socket | None = None) -> HealthReport: ...
    @overload
    def ask(self, request: Stats, timeout_s: float, gone: int | socket.socket | None = None) -> StatsReport: ...
    @overload
    def ask(
        self, request: Attach | WarmUp | Drain | Stop, timeout_s: float, gone: int | socket.socket | None = None
    ) -> Done: ...

    def ask(self, request: Request, timeout_s: float, gone: int | socket.socket | None = None) -> Answer:
        """Send a request and return the worker's answer, of the type that belongs to the request.

        ``gone`` is a descriptor that becomes readable when the worker ends: its pidfd, or the connection of
        ``send_regions``. The wait ends as soon as ``gone`` is readable.

        Raise ControlTimeout if there is no answer within ``timeout_s`` or the worker is gone. Raise ControlError if the
        worker refuses or has another protocol version, others can access the directory, or the client is closed.
        """
        with self._lock:
            if self._closed:
                raise ControlError("the control client is closed")
            data = self._exchange(messages.encode(request), _name(request), timeout_s, gone)
        return _checked(request, data)

    def send_regions(self, token: str, mailbox_fd: int, pool_fd: int, timeout_s: float = 5.0) -> socket.socket:
        """Send the two descriptors to the worker; the request ``Attach(token=token)`` then attaches them.

        The returned, non-blocking connection is the session: when it is closed, the worker unmaps the regions. The
        connection becomes readable (end of file) when the worker unmaps them itself or dies.
        Raise ControlTimeout if no worker accepts the descriptors, and ControlError for all other failures.
        """
        self._check_directory()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Python's own timeout would make connect fail at once while other connections wait to be accepted
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(*_seconds(timeout_s)))
            connection.connect(str(self.place.regions))
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            _, user, _ = _PEER.unpack(peer)
            if user != os.geteuid():
                raise ControlError(f"the worker in {self.place.path} runs as user {user}, not as {os.geteuid()}")
            socket.send_fds(connection, [token.encode()], [mailbox_fd, pool_fd])
            connection.setblocking(False)
        except ControlError:
            connection.close()
            raise
        except (BlockingIOError, FileNotFoundError, ConnectionError) as error:
            connection.close()
            raise ControlTimeout(f"no worker takes regions in {self.place.path}: {error}") from error
        except OSError as error:
            connection.close()
            raise ControlError(f"the regions could not be handed to the worker: {error}") from error
        return connection

    def close(self) -> None:
        """Close the client after the request in progress. Connections of ``send_regions`` stay open."""
        with self._lock:
            self._drop_socket()
            self._closed = True

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, request: bytes, name: str, timeout_s: float, gone: int | socket.socket | None) -> bytes:
        deadline = time.monotonic() + timeout_s
        self._check_directory()
        if self._socket is None:
            self._socket = self._connect()
        answered = False
        try:
            self._socket.send(request, zmq.NOBLOCK)
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            if gone is not None:
                poller.register(gone, zmq.POLLIN)
            events = dict(poller.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000))))
            if self._socket in events or (events and self._socket.poll(_LAST_ANSWER_MS)):
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                answered = len(frames) == 1
            elif events:
                raise ControlTimeout(f"the worker went away while it was asked for {name}")
            else:
                raise ControlTimeout(f"no answer to {name} from a worker in {self.place.path} within {timeout_s:g} s")
        except zmq.ZMQError as error:
            raise ControlTimeout(f"the worker in {self.place.path} cannot be asked for {name}: {error}") from error
        finally:
            if not answered:
                self._drop_socket()
        if not answered:
            raise ControlError(f"the worker answered {name} with {len(frames)} frames instead of one")
        return frames[0]

    def _connect(self) -> zmq.Socket[bytes]:
        self._sockets += 1
        new = self._context.socket(zmq.DEALER)
        new.setsockopt(zmq.ROUTING_ID, self._id + self._sockets.to_bytes(8, "little"))
        new.setsockopt(zmq.LINGER, 0)
        new.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        new.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        new.connect(self.place.control_address)
        return new

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _check_directory(self) -> None:
        try:
            self.place.check()
        except DirectoryError as error:
            raise ControlError(str(error)) from error


def _seconds(timeout_s: float) -> tuple[int, int]:
    """Return whole seconds and microseconds. At least 1 us, because 0 would mean no timeout."""
    return divmod(max(1, math.ceil(timeout_s * 1_000_000)), 1_000_000)


def _checked(request: Request, data: bytes) -> Answer:
    try:
        answer = messages.decode_answer(data)
    except messages.ProtocolError as error:
        raise ControlError(f"the worker's answer to {_name(request)} cannot be read: {error}") from error
    if isinstance(answer, Failed):
        raise ControlError(answer.reason)
    if not isinstance(answer, _ANSWERS[type(request)]):
        raise ControlError(f"the worker answered {_name(request)} with {type(answer).__name__}")
    if answer.protocol != messages.PROTOCOL:  # only a Welcome of another version passes decode_answer
        version = answer.version if isinstance(answer, Welcome) else "unknown"
        raise ControlError(
            f"the worker speaks protocol {answer.protocol} (sglang-hybrid {version}), this process speaks "
            f"{messages.PROTOCOL}: start the worker from the same installation as the server"
        )
    return answer


def _name(request: Request) -> str:
    return str(request.__struct_config__.tag)
