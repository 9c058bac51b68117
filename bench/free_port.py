"""Chooses a TCP port for a server that starts later."""

from __future__ import annotations

import random
import socket

# Below the ports that Linux gives to outgoing connections: one of those could take the port before the server does.
_FIRST, _LAST = 10_000, 32_767
_TRIES = 100


def free_port() -> int:
    """Return a port of 127.0.0.1 where nobody listens, chosen at random: others that ask now hardly get the same."""
    for port in random.SystemRandom().sample(range(_FIRST, _LAST + 1), _TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"{_TRIES} ports from {_FIRST} to {_LAST} are all in use")
