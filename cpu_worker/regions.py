"""The descriptor socket, over which clients send the descriptors of mailbox and pool to the worker.

A client sends one packet: its token, with exactly two descriptors. The connection then stays open for as long as the
worker may use the regions. For any other packet the connection and all received descriptors are closed, so that no
descriptor leaks.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import struct
import time
from pathlib import Path

_WAITING = 4  # number of connections that may wait to be attached
_BACKLOG = 8
_NAP_S = 0.05
_TOKEN = re.compile(rb"[0-9a-f]{32}")
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MOST_DESCRIPTORS = 253  # descriptors in one packet: SCM_MAX_FD


class RegionError(RuntimeError):
    """A connection or a region is refused. The message says why."""


class ConnectionClosed(RegionError):
    """The client has closed its connection, which is no error."""


class Offer:
    """A client's connection, with the token and the descriptors that were received over it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.token = ""  # empty until the packet was received
        self.descriptors: list[int] = []  # mailbox, pool

    def receive(self) -> bool:
        """Receive a packet without waiting. Return False if there is none.

        Raise RegionError if the client closed the connection, or sent anything but one token with two descriptors.
        """
        try:
            data, ancillary, _, _ = self.connection.recvmsg(
                len(b"00" * 16) + 1,
                socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize),
                socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT,
            )
        except BlockingIOError:
            return False
        except OSError as error:
            raise RegionError(f"the connection broke: {error}") from error
        received = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received.frombytes(content[: len(content) // received.itemsize * received.itemsize])
        try:
            self._accept_packet(data, list(received))
        except RegionError:
            _close_all(received)
            raise
        return True

    def _accept_packet(self, data: bytes, received: list[int]) -> None:
        if not data and not received:
            raise ConnectionClosed("the connection was closed")
        if self.token:
            raise RegionError("a second packet on a connection that takes one")
        if not _TOKEN.fullmatch(data):
            raise RegionError("a packet that is not a token of 32 hexadecimal digits")
        if len(received) != 2:
            raise RegionError(f"a token with {len(received)} descriptors instead of two, mailbox and pool")
        self.token, self.descriptors = data.decode("ascii"), received

    def close_descriptors(self) -> None:
        _close_all(self.descriptors)
        self.descriptors = []

    def close(self) -> None:
        """Close the descriptors and the connection. Further calls do nothing."""
        self.close_descriptors()
        self.connection.close()


class DescriptorSocket:
    """Listening socket at ``path``. It keeps the newest few offers until an attach request takes one by its token."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(str(path))
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._offers: list[Offer] = []  # oldest first

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll: ``serve`` has work when one is readable."""
        return [self._listener.fileno(), *(offer.connection.fileno() for offer in self._offers)]

    def serve(self) -> list[str]:
        """Accept the waiting connections and receive their packets. Return why connections were refused, in words."""
        problems: list[str] = []
        for _ in range(_BACKLOG):  # bounded, so that fast clients cannot keep the loop here for ever
            connection = self._accept(problems)
            if connection is None:
                break
            self._offers.append(Offer(connection))
        for offer in list(self._offers):
            self._receive(offer, problems)
        while len(self._offers) > _WAITING:
            self._offers.pop(0).close()
            problems.append(f"more than {_WAITING} connections wait to be attached: the oldest is dropped")
        return problems

    def find(self, token: str) -> Offer | None:
        """Return the newest offer with this token, or None. Call ``serve`` before: its packet may still be unread."""
        return next((offer for offer in reversed(self._offers) if offer.token == token), None)

    def take(self, offer: Offer) -> None:
        """Hand ``offer`` over to the caller, who must close it."""
        self._offers.remove(offer)

    def close(self) -> None:
        for offer in self._offers:
            offer.close()
        self._offers = []
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self, problems: list[str]) -> socket.socket | None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._offers:
                    # the listener stays readable until a descriptor is free
                    self._offers.pop(0).close()
                    problems.append(f"no descriptor left for a connection, the oldest is dropped: {error}")
                    continue
                problems.append(f"a connection could not be taken: {error}")
                time.sleep(_NAP_S)  # the listener stays readable, and the loop must not spin on it
                return None
            _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user == os.geteuid():
                return connection
            connection.close()
            problems.append(f"a connection of user {user} is refused, this worker serves user {os.geteuid()}")

    def _receive(self, offer: Offer, problems: list[str]) -> None:
        try:
            while offer.receive():
                pass
        except RegionError as error:
            self._offers.remove(offer)
            offer.close()
            if not isinstance(error, ConnectionClosed):
                problems.append(f"a connection for regions is closed: {error}")


def checked_size(fd: int, name: str) -> int:
    """Return the size of a region in bytes, after checking that it is a memfd that cannot shrink.

    Reading beyond the end of a region that has shrunk would kill this process. Raise RegionError for other files.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise RegionError(f"the {name} is not a memory file")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise RegionError(f"the {name} is not a memory file (memfd)") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise RegionError(f"the {name} is not sealed against shrinking (F_SEAL_SHRINK)")
    size = os.fstat(fd).st_size  # read again: the first size may be older than the seal
    if size <= 0:
        raise RegionError(f"the {name} is empty")
    return size


def _close_all(descriptors: list[int] | array.array[int]) -> None:
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
