"""Metrics of several ranks: each rank is a process that writes to one directory, and another process reads them all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

RANK = """
import sys
from sglang_hybrid.metrics import Rank, WorkerMetrics
from sglang_hybrid.metrics.readings import Readings
from sglang_hybrid.metrics.server import ServerMetrics

rank = int(sys.argv[1])
times = iter(range(100))
read = lambda: Readings(miss_blocks={"worker": 5 + rank}, block_bytes=2)
server = ServerMetrics(Rank(rank), read, lambda: next(times))
worker = WorkerMetrics(Rank(rank))
worker.worker_is(True)
worker.served("worker", 10 * (rank + 1))
for rows in (4, 2 + rank):
    server.batch_begins(rows, lambda: (rank, 100))
server.rests(lambda: (rank, 100))
"""


def test_ranks_are_told_apart_and_gauges_show_their_last_value(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for rank in ("0", "1"):
        subprocess.run([sys.executable, "-c", RANK, rank], env=environment, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))

    def value(name: str, rank: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sglang_hybrid_{name}", {"replica": "0", "rank": rank} | labels)

    for rank in ("0", "1"):
        assert value("worker_up", rank) == 1 == value("worker_starts_total", rank)
        assert value("miss_rows_total", rank, by="worker") == 10 * (int(rank) + 1)
        assert value("miss_bytes_total", rank, path="worker") == 2 * (5 + int(rank))
        assert value("decode_rows", rank) == 0  # both ranks are idle
        assert value("decode_step_seconds_count", rank) == 2 == value("decode_step_seconds_sum", rank)
        assert value("host_pool_used_bytes", rank) == int(rank)
    exported = {sample.name for family in registry.collect() for sample in family.samples}
    assert not {name for name in exported if "slots" in name or "wait" in name or "ratio" in name}
