"""Conversion of readings to points: which metric becomes which number."""

from __future__ import annotations

from sglang_hybrid.commands.top import names
from sglang_hybrid.commands.top.point import Latest, Point, RankWorker
from sglang_hybrid.commands.top.rates import Rates
from sglang_hybrid.commands.top.reading import Reading

_REPLICA = "replica"  # this package's label for a replica
_SGLANG_REPLICA = "dp_rank"  # SGLang's label for a replica
_GB = 1e9
_LABELS_OF_INFO = ("version", "sglang", "policy", "engine", "prediction")


def point_of(number: int, reading: Reading, rates: Rates | None) -> Point:
    """Return point ``number`` of a reading. ``rates`` are those since an earlier reading, None at the first reading."""
    return Point(
        number=number,
        time=reading.time,
        answered=True,
        running=reading.per_replica(names.RUNNING, _SGLANG_REPLICA),
        queued=reading.per_replica(names.QUEUED, _SGLANG_REPLICA),
        rows=reading.per_replica(names.DECODE_ROWS, _REPLICA),
        tokens_per_s=_tokens_per_s(reading, rates),
        cpu_ratio=reading.mean(names.CPU_RATIO),
        hit_ratio=reading.mean(names.HIT_RATIO),
        layer_cpu_ratio=reading.layers(names.LAYER_CPU_RATIO),
        layer_recall_interval=reading.layers(names.LAYER_RECALL_INTERVAL),
        gb_per_s=_gb_per_s(rates),
        blocks_per_s=_per_second(rates, names.MISS_BLOCKS, "path"),
        miss_rows_per_s=_per_second(rates, names.MISS_ROWS, "by"),
        worker_wait=rates.spread(names.WORKER_WAIT) if rates else None,
        decode_step=rates.spread(names.DECODE_STEP) if rates else None,
        pool_used_bytes=reading.total(names.POOL_USED),
        pool_bytes=reading.total(names.POOL),
        slots_used=reading.per_replica(names.SLOTS_USED, _REPLICA),
        slots=reading.per_replica(names.SLOTS, _REPLICA),
        whole_requests=reading.mean(names.WHOLE_REQUESTS),
    )


def latest_of(reading: Reading) -> Latest:
    info = [sample.labels for sample in reading.of(names.INFO) if sample.value]  # 0: labels that no longer hold
    return Latest(
        workers=_workers(reading),
        miss_rows=reading.by(names.MISS_ROWS, "by") or {},
        calibration_cosine=reading.layers(names.COSINE),
        info={label: info[0][label] for label in _LABELS_OF_INFO if info and label in info[0]},
        not_exported=tuple(name for name in names.SHOWN if not reading.has(name)),
    )


def _tokens_per_s(reading: Reading, rates: Rates | None) -> float | None:
    """Return the rate of SGLang's counter of decoded tokens, or without it SGLang's mean of the last decode steps."""
    counted = rates.per_replica(names.TOKENS, _SGLANG_REPLICA, mode="decode") if rates else None
    return reading.per_replica(names.THROUGHPUT, _SGLANG_REPLICA) if counted is None else counted


def _gb_per_s(rates: Rates | None) -> dict[str, float]:
    by_path = {path: rate / _GB for path, rate in _per_second(rates, names.MISS_BYTES, "path").items()}
    if recalled := _per_second(rates, names.RECALL_BYTES, ""):
        by_path["recall"] = sum(recalled.values()) / _GB
    return by_path


def _per_second(rates: Rates | None, name: str, label: str) -> dict[str, float]:
    return (rates.per_second(name, label) if rates else None) or {}


def _workers(reading: Reading) -> tuple[RankWorker, ...]:
    """Return one entry per rank that exports anything about a worker, in the order of replicas and ranks."""
    columns = [
        {(s.labels.get(_REPLICA, ""), s.labels.get("rank", "")): s.value for s in reading.of(name)}
        for name in (names.WORKER_UP, names.WORKER_STARTS, names.DEGRADED)
    ]
    up, starts, degraded = columns
    ranks = sorted(up.keys() | starts.keys() | degraded.keys(), key=lambda at: tuple(part.zfill(8) for part in at))
    return tuple(
        RankWorker(
            replica=at[0],
            rank=at[1],
            up=bool(up[at]) if at in up else None,
            starts=int(starts[at]) if at in starts else None,
            degraded=bool(degraded[at]) if at in degraded else None,
        )
        for at in ranks
    )
