"""Lines of JSON over a socket between a report and the process that holds the model."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Tell = Callable[[str, float], None]  # what is done, and how much of the request was done since the last call, of 1


class Channel:
    """One end of a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lines = end.makefile("r", encoding="utf-8")

    def send(self, message: Message) -> None:
        self._end.sendall((json.dumps(plain(message), allow_nan=False) + "\n").encode())

    def receive(self) -> Message | None:
        """The next message; None where the other side is gone."""
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
    """What JSON has: infinities and what is not a number become null, tuples lists, keys strings."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)
