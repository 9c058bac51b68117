"""Events that a server sends to its launcher's console: JSON lines through a FIFO that an environment variable names.

Any process of the server may write. Writing never blocks and never raises: a line is dropped if the FIFO is full or has
no reader. Without the environment variable every call returns at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path

import msgspec

from sglang_hybrid import env

_PIPE_BUF = select.PIPE_BUF  # bytes; writes up to this size are not mixed with those of other processes
_LONGEST_SENTENCE = 2000
_READ_BYTES = 1 << 16


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One event, which is one line of JSON. The tag is the name of the class."""


class Pool(Event, frozen=True, kw_only=True):
    """Size of the KV cache of one rank."""

    tokens: int
    host_bytes: int
    device_bytes: int  # bytes of the model and of digests; 0 without a GPU


class Model(Event, frozen=True, kw_only=True):
    """Shape, dtype and device of the model that is served."""

    layers: int
    dtype: str
    device: str
    context_tokens: int


class Worker(Event, frozen=True, kw_only=True):
    """A CPU worker is attached to this server."""

    pid: int
    provider: str
    variant: str
    threads: int


class Calibrating(Event, frozen=True, kw_only=True):
    """Calibration of predictions at the first start with a model. ``part`` is the share that is done."""

    part: float


class Refused(Event, frozen=True, kw_only=True):
    """The server refuses to start or go on, and ends. ``sentence`` says what to change."""

    sentence: str


class Ready(Event, frozen=True, kw_only=True):
    """The server answers requests at ``url``."""

    url: str
    model: str


class Prefill(Event, frozen=True, kw_only=True):
    """Start of a chunk of ``chunk`` prompt tokens, after ``done`` of ``total`` prompt tokens are computed."""

    done: int
    chunk: int
    total: int
    running: int
    waiting: int


class Layer(Event, frozen=True, kw_only=True):
    """Progress within a chunk of prompts: ``done`` of ``total`` layers are computed."""

    done: int
    total: int


class Decode(Event, frozen=True, kw_only=True):
    """Summary of the decode steps since the last event of this type."""

    running: int
    waiting: int
    tokens: int
    seconds: float


class Idle(Event, frozen=True, kw_only=True):
    """No request is running."""


AnyEvent = Pool | Model | Worker | Calibrating | Refused | Ready | Prefill | Layer | Decode | Idle

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)
_fifo: int | None = None  # this process's descriptor of the FIFO; -1: there is no reader; None: not opened yet


def enabled() -> bool:
    return _descriptor() >= 0


def tell(event: AnyEvent) -> None:
    """Write one event to the FIFO, or drop it if the FIFO is full or has no reader. Never blocks, never raises."""
    fifo = _descriptor()
    if fifo < 0:
        return
    line = _encoder.encode(event) + b"\n"
    if len(line) <= _PIPE_BUF:
        with contextlib.suppress(OSError):  # the FIFO is full, or the reader is gone
            os.write(fifo, line)


def _descriptor() -> int:
    global _fifo
    if _fifo is None:
        _fifo = -1
        with contextlib.suppress(OSError):  # there is no FIFO, or it has no reader
            path = env.EVENTS.get()
            if path is not None and path.is_fifo():
                _fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return _fifo


def refused(sentence: str) -> None:
    tell(Refused(sentence=sentence[:_LONGEST_SENTENCE]))


class _Pace:
    """Rate limit for hot loops: ``due`` returns True at most once per interval."""

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
    """Report progress of a chunk of prompts. May be called for every layer: at most two events a second are written."""
    if _descriptor() >= 0 and _layer_pace.due(time.monotonic()):
        tell(Layer(done=done, total=total))


class Reader:
    """The launcher's end of the FIFO. The constructor creates the FIFO at ``path``."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path, 0o600)
        self.path = path
        # opened for writing too, so that reads see no end of file while no server has the FIFO open
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""

    def fileno(self) -> int:
        return self._fd

    def read(self) -> list[AnyEvent]:
        """Return the events that were written since the last call. Does not block.

        Lines that are not events are skipped, because a bad line must not end the console.
        """
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
