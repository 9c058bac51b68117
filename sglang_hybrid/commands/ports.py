"""Checks that a server can listen at a port, and finds the process that listens there."""

from __future__ import annotations

import errno
import socket

import psutil

from sglang_hybrid.commands.arguments import Refused


def check_port(host: str, port: int, flag: str = "--port") -> None:
    """Raise Refused unless a server could listen at ``host`` and ``port`` now. Port 0 lets the system choose."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError, UnicodeError) as error:
        raise Refused(f"--host {host} {flag} {port}: no such address: {error}") from error
    family, kind, protocol, _name, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # The server sets this option too: connections that are closing do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OverflowError as error:
            raise Refused(f"{flag} {port}: {error}") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Refused(
                    f"port {port} of {host} is in use{_user_of(port)}: stop that program, or choose another {flag}"
                ) from error
            raise Refused(f"cannot listen at {host}, port {port}: {error.strerror}") from error


def _user_of(port: int) -> str:
    """Return " by process ID (NAME)" for the process that listens at ``port``, or "" if this user may not see it."""
    try:
        owner = listener(port)
        return f" by process {owner} ({psutil.Process(owner).name()})" if owner else ""
    except psutil.Error:
        return ""


def listener(port: int) -> int | None:
    """Return the id of the process that listens at a TCP port, or None if there is none that this user may see."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return connection.pid
    return None
