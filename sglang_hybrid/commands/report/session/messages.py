"""Messages between a report and the process that holds the model: lines of JSON over a socket."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Tell = Callable[[str, float], None]  # (what runs now, share of the request that was done since the last call)


class Channel:
    """One end of a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lines = end.makefile("r", encoding="utf-8")

    def send(self, message: Message) -> None:
        self._end.sendall((json.dumps(plain(message), allow_nan=False) + "\n").encode())

    def receive(self) -> Message | None:
        """Wait for the next message and return it, or None if the other side is gone."""
        try:
            line = self._lines.readline()
        except OSError:
            return None
        if not line.endswith("\n"):
            return None
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        self._lines.close()
        self._end.close()


def plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it: infinities and NaN become None, tuples lists, keys and others strings."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)
