"""The directory that a server and its worker share: it holds two Unix sockets that only their user can reach.

DIR/control.sock    ZMQ, the messages of ``messages.py``
DIR/regions.sock    SOCK_SEQPACKET, takes the descriptors of mailbox and pool
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

_LONGEST_SOCKET_PATH = 107  # sockaddr_un has 108 bytes, the last one is 0


class DirectoryError(RuntimeError):
    """The directory cannot be used. The message says what to do."""


@dataclass(frozen=True)
class WorkerDirectory:
    """Paths of a worker's directory. Only ``check`` accesses the file system."""

    path: Path

    @classmethod
    def at(cls, directory: str | Path) -> WorkerDirectory:
        """Return the paths in ``directory``. Raise DirectoryError if a socket's path is too long for the system."""
        place = cls(Path(directory).absolute())
        length = max(len(os.fsencode(socket)) for socket in (place.control, place.regions))
        if length > _LONGEST_SOCKET_PATH:
            raise DirectoryError(
                f"directory {place.path} is {length - _LONGEST_SOCKET_PATH} bytes too long: the path of a Unix socket "
                f"has at most {_LONGEST_SOCKET_PATH} bytes; use a shorter one, such as one in /tmp"
            )
        return place

    @property
    def control(self) -> Path:
        return self.path / "control.sock"

    @property
    def regions(self) -> Path:
        return self.path / "regions.sock"

    @property
    def control_address(self) -> str:
        return f"ipc://{self.control}"

    def check(self) -> None:
        """Raise DirectoryError unless only this user can access the directory: others could pose as the other side."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except OSError as error:
            raise DirectoryError(f"directory {self.path} cannot be used: {error.strerror}") from error
        if not stat.S_ISDIR(status.st_mode):
            raise DirectoryError(f"{self.path} is not a directory")
        if status.st_uid != os.geteuid():
            raise DirectoryError(
                f"directory {self.path} belongs to user {status.st_uid}, this process runs as user {os.geteuid()}: "
                "server and worker must run as the same user, in a directory of that user"
            )
        if stat.S_IMODE(status.st_mode) != 0o700:
            raise DirectoryError(
                f"directory {self.path} has mode {stat.S_IMODE(status.st_mode):04o}, others could reach the worker's "
                f"sockets or replace them: chmod 700 {self.path}"
            )
