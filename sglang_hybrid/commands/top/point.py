"""Data that a view shows: numbers of each moment, and facts of the latest moment. ``--json`` prints the same fields.

None means that the server does not export a number, or that the number needs a second reading.
"""

from __future__ import annotations

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """Distribution of times measured in the last seconds. Quantiles are interpolated between a histogram's bounds."""

    mean_ms: float
    p50_ms: float | None
    p99_ms: float | None


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a server at one moment, over all ranks and replicas. Rates are those of the last seconds."""

    number: int  # counts up from 1
    time: float  # Unix time
    answered: bool  # False: the server did not answer, and there are no numbers
    running: float | None = None
    queued: float | None = None
    rows: float | None = None  # requests in the last decode step
    tokens_per_s: float | None = None
    cpu_ratio: float | None = None
    hit_ratio: float | None = None
    layer_cpu_ratio: tuple[float | None, ...] = ()
    layer_recall_interval: tuple[float | None, ...] = ()  # decode steps; 0: never
    gb_per_s: dict[str, float] = {}  # by path: the paths of misses, and "recall"
    blocks_per_s: dict[str, float] = {}  # missed blocks by path
    miss_rows_per_s: dict[str, float] = {}  # by what served them: "worker", or a fallback such as "process-late"
    worker_wait: Spread | None = None
    decode_step: Spread | None = None
    pool_used_bytes: float | None = None
    pool_bytes: float | None = None
    slots_used: float | None = None  # blocks of one layer and KV head
    slots: float | None = None
    whole_requests: float | None = None  # share of ranks that have whole requests in GPU memory


class RankWorker(msgspec.Struct, frozen=True):
    """The CPU worker of one rank."""

    replica: str
    rank: str
    up: bool | None
    starts: int | None
    degraded: bool | None

    @property
    def restarts(self) -> int | None:
        return None if self.starts is None else max(0, self.starts - 1)


class Latest(msgspec.Struct, frozen=True):
    """Facts of the last reading that no chart shows over time."""

    workers: tuple[RankWorker, ...] = ()
    miss_rows: dict[str, float] = {}  # since the server's start, by the keys of Point.miss_rows_per_s
    calibration_cosine: tuple[float | None, ...] = ()  # by layer
    info: dict[str, str] = {}  # version, sglang, policy, engine, prediction
    not_exported: tuple[str, ...] = ()  # names of metrics
