"""A server for tests of ``sglang-hybrid top``: SGLang's endpoints with the numbers of an invented GPU server.

A test sets the load, and time passes only when the test calls ``Engine.advance``. Started by hand, as for a picture of
the page, the server lets time pass and the load change: ``python tests/unit/fake_metrics_server.py --port 30000``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GIB = 1 << 30
BLOCK_BYTES = 2 * 32 * 128 * 2  # keys and values of 32 tokens in 16 bits
BOUNDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
LABELS = 'replica="0",rank="0"'
SGLANG_LABELS = 'model_name="fake",engine_type="unified",tp_rank="0",pp_rank="0",moe_ep_rank="0"'


@dataclass
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[sum(value > bound for bound in BOUNDS)] += times
        self.total += value * times

    def lines(self, name: str) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        below = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{{LABELS},le="{bound}"}} {below}.0'
        yield f"{name}_sum{{{LABELS}}} {self.total}"
        yield f"{name}_count{{{LABELS}}} {below}.0"


@dataclass
class Engine:
    """State of an invented engine. ``load`` is the share of its 32 rows that are busy.

    ``busy_layers`` are the layers that leave more misses to the CPU than others do.
    """

    layers: int = 40
    load: float = 0.5
    queued: int = 0
    worker_up: bool = True
    recalls: bool = True
    starts: int = 1
    busy_layers: tuple[int, ...] = (3, 4, 17, 18, 29)
    leave_out: tuple[str, ...] = ()  # names of metrics that are not exported
    tokens: float = 0.0
    miss_bytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("worker", "gather", "device"), 0.0))
    recall_bytes: float = 0.0
    miss_rows: dict[str, float] = field(default_factory=lambda: {"worker": 0.0})
    wait: Histogram = field(default_factory=Histogram)
    step: Histogram = field(default_factory=Histogram)
    noise: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def rows(self) -> int:
        return round(32 * self.load)

    def advance(self, seconds: float) -> None:
        steps = int(seconds / self.step_seconds) if self.rows else 0
        self.tokens += steps * self.rows
        for layer in range(self.layers):
            missed = self.ratio(layer) * 64 * 8 * self.rows * BLOCK_BYTES * steps
            self.miss_bytes["worker" if self.worker_up else "device"] += 0.7 * missed
            self.miss_bytes["gather"] += 0.3 * missed
            recalls = steps / self.interval(layer) if self.recalls else 0.0
            self.recall_bytes += recalls * self.rows * 20 * 8 * BLOCK_BYTES
        by = "worker" if self.worker_up else "device-no-worker"
        self.miss_rows[by] = self.miss_rows.get(by, 0.0) + steps * self.rows * self.layers
        for _ in range(min(steps, 50)):
            self.step.add(self.step_seconds * self.noise.uniform(0.9, 1.3), max(1, steps // 50))
            self.wait.add(0.0001 + 0.0008 * self.load * self.noise.random(), max(1, steps // 50))

    @property
    def step_seconds(self) -> float:
        return 0.006 + 0.012 * self.load

    def ratio(self, layer: int) -> float:
        shape = 0.35 + 0.25 * math.sin(layer / 5) + (0.9 if layer in self.busy_layers else 0.0)
        return max(0.0, min(1.0, 0.3 * self.load * shape))

    def interval(self, layer: int) -> float:
        """Return the number of decode steps between two recalls of a layer, or 0 if the layer never recalls."""
        return max(1.0, round(12 - 40 * self.ratio(layer))) if self.recalls else 0.0

    def text(self) -> str:
        return "\n".join((*self._sglang(), *(line for line in self._hybrid() if self._exported(line)), ""))

    def _exported(self, line: str) -> bool:
        return not any(line.startswith((f"{name}{{", f"{name}_", f"# TYPE {name} ")) for name in self.leave_out)

    def _sglang(self) -> Iterator[str]:
        rate = self.rows / self.step_seconds
        values = {"num_running_reqs": self.rows, "num_queue_reqs": self.queued, "gen_throughput": rate}
        for name, value in values.items():
            yield f"# TYPE sglang:{name} gauge\nsglang:{name}{{{SGLANG_LABELS}}} {value}"
        yield "# TYPE sglang:realtime_tokens_total counter"
        yield f'sglang:realtime_tokens_total{{{SGLANG_LABELS},mode="decode"}} {self.tokens}'

    def _hybrid(self) -> Iterator[str]:
        used = 0.15 + 0.8 * self.load
        ratios = [self.ratio(layer) for layer in range(self.layers)]
        gauges = {
            "worker_up": float(self.worker_up),
            "degraded": float(not self.worker_up),
            "cpu_compute_ratio": sum(ratios) / len(ratios),
            "resident_hit_ratio": 1 - 0.5 * sum(ratios) / len(ratios),
            "decode_rows": self.rows,
            "host_pool_used_bytes": used * 84 * GIB,
            "host_pool_bytes": 84 * GIB,
            "slots_used": 80 * self.rows,
            "slots": 80 * 32,
            "whole_requests": 0,
        }
        for name, value in gauges.items():
            yield f"# TYPE sglang_hybrid_{name} gauge"
            yield f"sglang_hybrid_{name}{{{LABELS}}} {value}"
        yield from _by("miss_rows_total", "counter", "by", self.miss_rows)
        yield from _by("miss_bytes_total", "counter", "path", self.miss_bytes)
        blocks = {path: amount / BLOCK_BYTES for path, amount in self.miss_bytes.items()}
        yield from _by("miss_blocks_total", "counter", "path", blocks)
        yield f"# TYPE sglang_hybrid_recall_bytes_total counter\nsglang_hybrid_recall_bytes_total{{{LABELS}}} " + str(
            self.recall_bytes
        )
        yield f"# TYPE sglang_hybrid_worker_starts_total counter\nsglang_hybrid_worker_starts_total{{{LABELS}}} " + str(
            float(self.starts)
        )
        by_layer = dict(enumerate(ratios))
        yield from _by("layer_cpu_compute_ratio", "gauge", "layer", by_layer)
        intervals = {layer: self.interval(layer) for layer in range(self.layers)}
        yield from _by("layer_recall_interval_steps", "gauge", "layer", intervals)
        yield from _by(
            "calibration_cosine", "gauge", "layer", {layer: 0.99 - 0.1 * ratio for layer, ratio in by_layer.items()}
        )
        yield from self.wait.lines("sglang_hybrid_worker_wait_seconds")
        yield from self.step.lines("sglang_hybrid_decode_step_seconds")
        about = 'version="0.2.0",sglang="0.5.23",policy="scout",engine="cuda",prediction="calibrated"'
        yield f"# TYPE sglang_hybrid_info gauge\nsglang_hybrid_info{{{LABELS},{about}}} 1.0"


def _by(name: str, kind: str, label: str, values: Mapping[Any, float]) -> Iterator[str]:
    yield f"# TYPE sglang_hybrid_{name} {kind}"
    for key, value in values.items():
        yield f'sglang_hybrid_{name}{{{LABELS},{label}="{key}"}} {value}'


SETTINGS = {
    "policy": "scout",
    "prediction": "calibrated",
    "host_memory": "84GiB",
    "budget_tokens": 2048,
    "digest_dtype": "int8",
    "sketch_channels": 16,
    "whole_requests": "auto",
    "worker_threads": 15,
    "worker_deadline_ms": 50,
    "scout": {"target_cpu_ratio": 0.08, "recall_interval": 12, "recall_adapt": True, "resident_bonus": 0.5},
}
INFO = {
    "attention_backend": "hybrid",
    "served_model_name": "Qwen3-14B",
    "model_path": "/models/Qwen3-14B",
    "api_key": "secret-of-the-server",
    "context_length": 65536,
    "tp_size": 1,
    "dp_size": 1,
    "dtype": "bfloat16",
    "device": "cuda",
    "max_running_requests": 32,
    "page_size": 32,
    "internal_states": [{"sglang_hybrid": {"engine": "cuda", "settings": SETTINGS, "pool": {"tokens": 550_000}}}],
}


class FakeServer:
    """Serves an engine's metrics on a thread. Answers may change at any time; the server may restart at its port."""

    def __init__(self, engine: Engine | None = None, port: int = 0) -> None:
        self.engine = engine or Engine()
        self.answers: dict[str, tuple[int, str]] = {}  # status and body by path, in place of the usual answer
        self.info: dict[str, Any] = dict(INFO)
        self.info_key: str | None = None  # the API key that /server_info requires; None: no key
        self.asked: list[str] = []  # paths of all requests
        self.hybrid = True
        self._http: ThreadingHTTPServer | None = None
        self.start(port)

    def start(self, port: int = 0) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = fake.answer(self.path, self.headers.get("Authorization"))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._http:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def restart(self) -> None:
        self.stop()
        self.engine = Engine(layers=self.engine.layers, load=self.engine.load)
        self.start(self.port)

    def answer(self, path: str, authorization: str | None) -> tuple[int, str]:
        self.asked.append(path)
        if path in self.answers:
            return self.answers[path]
        match path:
            case "/metrics" if self.hybrid:
                return 200, self.engine.text()
            case "/metrics":
                return 200, "\n".join(self.engine._sglang()) + "\n"
            case "/server_info" if self.info_key and authorization != f"Bearer {self.info_key}":
                return 401, "{}"
            case "/server_info":
                return 200, json.dumps(self.info)
            case "/v1/models":
                return 200, json.dumps({"data": [{"id": "fake", "owned_by": "sglang"}]})
        return 404, "{}"

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def main() -> None:
    """Serve for ever: time passes, the load rises and falls in waves, and the worker is gone now and then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--speed", type=float, default=1.0, help="of the waves")
    options = parser.parse_args()
    with FakeServer(port=options.port) as server:
        began = time.monotonic()
        print(server.url, flush=True)
        while True:
            now = (time.monotonic() - began) * options.speed
            engine = server.engine
            engine.load = min(1.0, max(0.0, 0.55 + 0.4 * math.sin(now / 60) + engine.noise.uniform(-0.04, 0.04)))
            engine.queued = max(0, round(14 * (engine.load - 0.75)))
            up = now % 300 > 12
            engine.starts += up and not engine.worker_up
            engine.worker_up = up
            engine.advance(0.25)
            time.sleep(0.25)


if __name__ == "__main__":
    main()
