"""Polls one server for ever and keeps what a view shows: the last points, the latest reading, and the problem."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_hybrid.commands.top import about
from sglang_hybrid.commands.top.derive import latest_of, point_of
from sglang_hybrid.commands.top.point import Latest, Point
from sglang_hybrid.commands.top.rates import Rates
from sglang_hybrid.commands.top.reading import Reading
from sglang_hybrid.commands.top.server import Kind, Server, Unwatchable

POINTS = 300  # number of points that are kept: ten minutes at the default interval
INFO_EVERY = 30.0  # seconds
RATE_SECONDS = 5.0  # minimum time that rates cover: a slow server takes seconds for a decode step


class Problem(msgspec.Struct, frozen=True):
    kind: Kind
    text: str
    since: float  # Unix time


class State(msgspec.Struct, frozen=True):
    """Everything that a view shows. ``points`` are those after the number that the view asked for."""

    run: str  # identifies a run of this program: a new run numbers its points from 1 again
    url: str
    interval: float
    capacity: int  # points that are kept
    time: float  # Unix time
    problem: Problem | None
    model: str | None
    latest: Latest
    settings: dict[str, str] | None  # settings of this package; None: not known
    facts: dict[str, str]  # facts that follow from the settings
    arguments: dict[str, str]  # arguments of SGLang
    points: tuple[Point, ...]


class Watch:
    """Poller of one server. One thread calls ``run`` or ``poll``; any thread may call ``state``."""

    def __init__(self, server: Server, interval: float, capacity: int = POINTS) -> None:
        self.interval = interval
        self._server = server
        self._run = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._points: deque[Point] = deque(maxlen=capacity)
        self._number = 0
        self._readings: deque[Reading] = deque()  # readings of the last RATE_SECONDS, and one earlier reading
        self._latest = Latest()
        self._failure: Problem | None = None
        self._answers_since = 0.0  # Unix time
        self._info: Mapping[str, Any] | None = None
        self._info_known = False  # the server was asked, though it may not have answered
        self._info_at: float | None = None  # monotonic time of the last request for it
        self._info_thread: threading.Thread | None = None

    def run(self, stop: threading.Event) -> None:
        """Poll until ``stop`` is set. After a poll that took longer than the interval, the next one starts at once."""
        while not stop.is_set():
            began = time.monotonic()
            self.poll()
            stop.wait(max(0.0, self.interval - (time.monotonic() - began)))

    @property
    def answers(self) -> bool:
        """True if the last poll took a reading."""
        return bool(self._readings) and self._failure is None

    def poll(self, *, ask_info: bool = True) -> None:
        """Take one reading. With ``ask_info``, also request the server's settings if due, in a thread of its own."""
        try:
            reading = self._server.read()
        except Unwatchable as failure:
            self._fail(failure)
            return
        self._take(reading)
        if ask_info and self._info_due():
            self._info_thread = threading.Thread(target=self.ask_info, daemon=True)
            self._info_thread.start()

    def ask_info(self) -> None:
        self._info_at = time.monotonic()
        info = self._server.info()
        with self._lock:
            self._info_known = True
            self._info = info or self._info  # a busy server may not answer in time

    def state(self, after: int = 0) -> State:
        """Return the state with the points after number ``after``, the last one that the view has."""
        with self._lock:
            info = self._info or {}
            return State(
                run=self._run,
                url=self._server.url,
                interval=self.interval,
                capacity=self._points.maxlen or 0,
                time=time.time(),
                problem=self._failure or self._stock(),
                model=about.model_of(info),
                latest=self._latest,
                settings=about.settings_of(info) or None,
                facts=about.facts_of(info),
                arguments=about.arguments_of(info),
                points=tuple(point for point in self._points if point.number > after),
            )

    def _take(self, reading: Reading) -> None:
        restarted = self._forget_readings(reading)
        rates = Rates(self._readings[0], reading) if self._readings else None
        with self._lock:
            self._number += 1
            self._points.append(point_of(self._number, reading, rates))
            self._latest = latest_of(reading)
            if self._failure or not self._readings:
                self._answers_since = reading.time
            if self._failure or restarted:
                self._forget_info()
            self._failure = None
            if restarted:
                self._readings.clear()
            self._readings.append(reading)

    def _forget_readings(self, reading: Reading) -> bool:
        """Drop readings that are too old for rates up to ``reading``. Return True if the server was restarted since the
        last reading, which is then the only one left."""
        restarted = bool(self._readings) and Rates(self._readings[-1], reading).restarted
        while len(self._readings) > 1 and (restarted or self._readings[1].at <= reading.at - RATE_SECONDS):
            self._readings.popleft()
        return restarted

    def _fail(self, failure: Unwatchable) -> None:
        now = time.time()
        with self._lock:
            self._number += 1
            self._points.append(Point(number=self._number, time=now, answered=False))
            same = self._failure is not None and self._failure.kind is failure.kind
            since = self._failure.since if same and self._failure else now
            self._failure = Problem(failure.kind, str(failure), since)

    def _forget_info(self) -> None:
        """Forget the server's settings: another server with other settings may answer now."""
        self._info, self._info_known, self._info_at = None, False, None

    def _info_due(self) -> bool:
        if self._info_thread and self._info_thread.is_alive():
            return False
        return self._info_at is None or time.monotonic() - self._info_at >= INFO_EVERY

    def _stock(self) -> Problem | None:
        """Return a problem if the server runs without this package's backend: only SGLang's numbers are shown then."""
        if not self._readings or self._readings[-1].is_hybrid or not self._info_known:
            return None
        if self._info is None:
            why = f"the server at {self._server.url} exports no metric of sglang-hybrid and does not tell its settings"
        elif about.is_hybrid(self._info):
            return None
        else:
            backend = about.backend_of(self._info)
            why = f"the server at {self._server.url} is stock SGLang (attention backend {backend})"
        text = f"{why}. Only SGLang's own numbers are shown. Start it with sglang-hybrid serve --enable-metrics."
        return Problem(Kind.STOCK, text, self._answers_since)
