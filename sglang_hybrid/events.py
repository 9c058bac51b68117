"""What a server tells its launcher for the console: JSON lines through a FIFO that an environment variable names.

Any process of the server may write. Writing never blocks and never raises: a line that the FIFO has no room for, or
that nobody reads, is dropped. Without the variable every call returns at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path

import msgspec

from sglang_hybrid import env

_PIPE_BUF = select.PIPE_BUF  # writes up to this size are not mixed with those of other processes
_LONGEST_SENTENCE = 2000
_READ_BYTES = 1 << 16


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One line. The tag is the class's name."""


class Pool(Event, frozen=True, kw_only=True):
    """The KV cache of one rank."""

    tokens: int
    host_bytes: int
    device_bytes: int  # model and digests; 0 without a GPU


class Model(Event, frozen=True, kw_only=True):
    """How the model is computed."""

    layers: int
    dtype: str
    device: str
    context_tokens: int


class Worker(Event, frozen=True, kw_only=True):
    """A CPU worker serves this server."""

    pid: int
    provider: str
    variant: str
    threads: int


class Calibrating(Event, frozen=True, kw_only=True):
    """Predictions are calibrated, as they are at the first start with a model: ``part`` of it is done."""

    part: float


class Refused(Event, frozen=True, kw_only=True):
    """The server ends, and this sentence says what to change."""

    sentence: str


class Ready(Event, frozen=True, kw_only=True):
    """The server answers requests at ``url``."""

    url: str
    model: str


class Prefill(Event, frozen=True, kw_only=True):
    """A chunk of prompts begins: ``done`` of ``total`` prompt tokens are computed, ``chunk`` more are under way."""

    done: int
    chunk: int
    total: int
    running: int
    waiting: int


class Layer(Event, frozen=True, kw_only=True):
    """Layers of the chunk under way that are computed."""

    done: int
    total: int


class Decode(Event, frozen=True, kw_only=True):
    """Decode steps since the last of these events."""

    running: int
    waiting: int
    tokens: int
    seconds: float


class Idle(Event, frozen=True, kw_only=True):
    """Nothing runs."""


AnyEvent = Pool | Model | Worker | Calibrating | Refused | Ready | Prefill | Layer | Decode | Idle

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)
_fifo: int | None = None  # of this process; -1: there is nobody to tell


def enabled() -> bool:
    return _descriptor() >= 0


def tell(event: AnyEvent) -> None:
    """Write one line, or drop it."""
    fifo = _descriptor()
    if fifo < 0:
        return
    line = _encoder.encode(event) + b"\n"
    if len(line) <= _PIPE_BUF:
        with contextlib.suppress(OSError):  # full, or nobody reads any more
            os.write(fifo, line)


def _descriptor() -> int:
    global _fifo
    if _fifo is None:
        _fifo = -1
        with contextlib.suppress(OSError):  # no FIFO, or nobody reads
            path = env.EVENTS.get()
            if path is not None and path.is_fifo():
                _fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return _fifo


def refused(sentence: str) -> None:
    tell(Refused(sentence=sentence[:_LONGEST_SENTENCE]))


class _Pace:
    """Returns True at most once per interval, so that a hot loop may ask every time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    def due(self, now: float) -> bool:
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


_layer_pace = _Pace(0.5)


def layer(done: int, total: int) -> None:
    """Called for every layer of a chunk of prompts; told twice a second."""
    if _descriptor() >= 0 and _layer_pace.due(time.monotonic()):
        tell(Layer(done=done, total=total))


class Reader:
    """The launcher's end: makes the FIFO, and collects what was written since the last call."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path, 0o600)
        self.path = path
        # opened for writing too, so that there is no end of file while no server has opened it
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""

    def fileno(self) -> int:
        return self._fd

    def read(self) -> list[AnyEvent]:
        """Lines that are not events are skipped: a console must not end because of what it shows."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, _READ_BYTES):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        found = []
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):
                found.append(_decoder.decode(line))
        return found

    def close(self) -> None:
        os.close(self._fd)
