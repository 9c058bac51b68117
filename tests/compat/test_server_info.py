"""Server info and metrics are read from objects of the installed SGLang."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_hybrid.config import load_config
from sglang_hybrid.integration import server_info, server_metrics
from sglang_hybrid.integration.attention_backend import HybridAttnBackend
from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.integration.predictor import Scouting
from sglang_hybrid.metrics.server import ServerMetrics

WORKER = {"attached": True, "provider": "native", "threads": 3}


class Metrics(ServerMetrics):
    """Stand-in for the metrics that records its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def batch_begins(self, decoded_rows: int | None, pool: Any) -> None:
        self.told.append((decoded_rows, pool()))

    def rests(self, pool: Any) -> None:
        self.told.append(("rests", pool()))


def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stand-in scheduler for our hooks: a pool of 320 tokens and 2 layers, 96 tokens free, 64 cached."""
    monkeypatch.setattr(HostKVPool, "in_this_process", True)
    monkeypatch.setattr(server_metrics, "_failed", False)
    backend = HybridAttnBackend.__new__(HybridAttnBackend)
    backend._config, backend.metrics = load_config(None, ["budget_tokens=1024"]), Metrics()
    buffers = [torch.empty(11, 2, 32, 8) for _ in range(2)]
    pool: Any = SimpleNamespace(
        region=SimpleNamespace(size=1 << 21), size=320, dtype=torch.float32, layer_num=2,
        k_buffer=buffers, v_buffer=buffers,
    )  # fmt: skip
    backend._pool = pool
    backend.engine = SimpleNamespace(name="torch", describe_worker=lambda: WORKER)  # type: ignore[assignment]
    backend._scouting = Scouting(None)
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend)),
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 96, get_kvcache=lambda: pool),
        tree_cache=SimpleNamespace(evictable_size=lambda: 64),
        max_total_num_tokens=320,
        metrics=backend.metrics,
    )


def test_the_internal_state_gets_the_effective_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io_struct.GetInternalStateReqOutput(internal_state={"version": "theirs"})
    server_info.add_settings(output, scheduler(monkeypatch), io_struct.GetInternalStateReq())
    told = output.internal_state[server_info.KEY]
    assert output.internal_state["version"] == "theirs"
    assert (told["engine"], told["policy"], told["prediction"]) == ("torch", "scout", "none")
    assert told["settings"]["budget_tokens"] == 1024 and told["settings"]["scout.recall_adapt"] in (True, False)
    assert told["automatic"]["prediction"] == "none (no profile)" and "host_memory" not in told["automatic"]
    assert told["worker"] == WORKER and told["pool"] == {"bytes": 1 << 21, "tokens": 320, "dtype": "float32"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output.internal_state)) == output.internal_state


def test_the_state_of_a_server_with_another_backend_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = scheduler(monkeypatch)
    monkeypatch.setattr(HostKVPool, "in_this_process", False)
    output = io_struct.GetInternalStateReqOutput(internal_state={})
    server_info.add_settings(output, other)
    server_metrics.scheduler_is_idle(other)
    assert output.internal_state == {} and other.metrics.told == []


def test_info_that_cannot_be_had_does_not_end_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = scheduler(monkeypatch)
    del made.tp_worker.model_runner.attn_backend._pool.region
    output = io_struct.GetInternalStateReqOutput(internal_state={})
    server_info.add_settings(output, made)
    assert output.internal_state == {} and "the server's info says nothing of sglang-hybrid" in caplog.text


def test_batches_tell_their_rows_and_what_the_pool_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scheduler(monkeypatch)
    for mode in (ForwardMode.EXTEND, ForwardMode.DECODE):
        server_metrics.batch_begins(made, SimpleNamespace(reqs=[1, 2, 3], forward_mode=mode))
    server_metrics.scheduler_is_idle(made)
    per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, dim, bytes
    pool = (160 * per_token, 320 * per_token)
    assert made.metrics.told == [(None, pool), (3, pool), ("rests", pool)]


def test_a_scheduler_of_another_shape_ends_metrics_and_not_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = scheduler(monkeypatch)
    del made.tree_cache
    for _ in range(2):
        server_metrics.scheduler_is_idle(made)
    assert caplog.text.count("some metrics are not published any more") == 1


def test_what_metrics_ask_of_sglang_exists() -> None:
    assert {"available_size", "get_kvcache"} <= {*dir(PagedTokenToKVPoolAllocator)}
    assert "evictable_size" in dir(BasePrefixCache)
    assert "self.max_total_num_tokens" in inspect.getsource(Scheduler)
    assert list(inspect.signature(Scheduler.get_internal_state).parameters) == ["self", "recv_req"]
