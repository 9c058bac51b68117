"""The CUDA engine's work outside its kernels, without a GPU: it follows workers and resets new rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.config import load_config
from sglang_hybrid.engines.base import StepBatch
from sglang_hybrid.engines.cuda import engine as cuda_engine
from sglang_hybrid.engines.cuda.engine import CudaEngine
from sglang_hybrid.engines.cuda.whole_request_mode import WholeRequestMode
from sglang_hybrid.integration import create_engines
from sglang_hybrid.integration.pools import ranks_on_this_host
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.ops.cuda import CudaError
from sglang_hybrid.ops.reference import FP8


class Mailbox:
    """Stand-in for the device's end of the mailbox. It cannot register the memory of the mailbox "too much"."""

    def __init__(self) -> None:
        self.attached: list[object] = []

    def attach(self, mailbox: object) -> None:
        self.attached.append(mailbox)
        if mailbox == "too much":
            raise CudaError("out of memory: ulimit -l")


class Program:
    def __init__(self) -> None:
        self.begun: list[list[int]] = []

    def reset_rows(self, rows: torch.Tensor) -> None:
        self.begun.append(rows.tolist())


def device_attention() -> Any:
    made: Any = CudaEngine.__new__(CudaEngine)
    made._mailbox, made._followed, made._link = Mailbox(), None, None
    made._supervisor = SimpleNamespace(link=None)
    made._metrics = SimpleNamespace(ups=[], worker_is=lambda up: made._metrics.ups.append(up))
    made.program, made._arrived, made._req_to_token = Program(), [], torch.empty(0)
    return made


def test_a_mailbox_that_the_gpu_cannot_have_means_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    """If registering a new worker's memory fails, the server must go on without that worker."""
    device = device_attention()
    device._supervisor.link = SimpleNamespace(pid=4711, mailbox="too much")
    for _ in range(3):  # steps
        device._follow_worker()
    assert device._link is None
    assert device._mailbox.attached == [None, "too much"]  # tried only once
    assert device._metrics.ups == [False]
    assert "CPU worker 4711 is not used, the GPU cannot have its mailbox: out of memory" in caplog.text

    device._supervisor.link = another = SimpleNamespace(pid=4712, mailbox="small")
    device._follow_worker()
    assert device._link is another


def test_rows_that_arrive_are_reset_with_the_next_step() -> None:
    """Resetting at once would run on another stream than the last step of the rows' previous requests."""
    device = device_attention()
    device.reset_rows(torch.tensor([3]))
    device.reset_rows(torch.tensor([5, 1]))
    assert device.program.begun == []
    device._begin_arrived_rows()
    device._begin_arrived_rows()
    assert device.program.begun == [[3, 5, 1]]


@pytest.mark.parametrize(
    ("settings", "starts"),
    [([], True), (["worker=none"], False), (["policy=full"], False), (["policy=full", "worker=start"], False)],
)
def test_a_worker_is_started_for_policies_that_need_one(
    settings: list[str], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that selects nothing would have a worker without posts."""
    monkeypatch.setattr(cuda_engine, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(cuda_engine, "CudaEngine", lambda *given: SimpleNamespace(worker=given[-1], admission=None))
    monkeypatch.setattr(create_engines, "checked_geometry", lambda *_: "geometry")
    monkeypatch.setattr(create_engines, "start_worker", lambda *_: ("supervisor", "metrics"))
    pool: Any = SimpleNamespace(layer_num=2)
    model: Any = SimpleNamespace(code_steps=[])
    made: Any = create_engines._cuda_engine(load_config(None, settings), None, pool, model, None)
    assert made.worker == (("supervisor", "metrics", "geometry") if starts else None)


@pytest.mark.parametrize(
    ("cuda_graphs", "head_dim", "why"), [(False, 128, "CUDA graphs are off"), (True, 80, "head_dim 80")]
)
def test_an_fp8_cache_that_no_kernel_reads_is_refused_instead_of_served_in_torch(
    cuda_graphs: bool, head_dim: int, why: str
) -> None:
    pool: Any = SimpleNamespace(device="cuda:0", dtype=FP8, head_dim=head_dim, v_head_dim=head_dim)
    model: Any = SimpleNamespace(cuda_graphs=cuda_graphs, scale=0.1, group=4, dtype=torch.bfloat16)
    with pytest.raises(Refusal, match=rf"read by CUDA kernels only.*{why}.*--kv-cache-dtype bfloat16"):
        create_engines._cuda_engine(load_config(None, []), None, pool, model, None)


def test_a_cache_and_a_model_of_different_16_bits_have_no_kernels() -> None:
    pool: Any = SimpleNamespace(device="cuda:0", dtype=torch.bfloat16, head_dim=128, v_head_dim=128)
    model: Any = SimpleNamespace(cuda_graphs=True, scale=0.1, group=4, dtype=torch.float16)
    said = cuda_engine.unsupported_reason(load_config(None, []), pool, model)
    assert said == "a model in torch.float16 with a KV cache of torch.bfloat16"
    model.dtype = torch.bfloat16
    assert cuda_engine.unsupported_reason(load_config(None, []), pool, model) is None


def test_a_program_without_counters_moves_rows_out_of_device_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="sglang.srt.hybrid")
    told: list[Any] = []
    device = device_attention()
    device._whole_requests, device._near_tokens, device.watch = WholeRequestMode(pages=4, block_bytes=1), 32, None
    device.program = SimpleNamespace(
        is_dense=True,
        begin_step=lambda: None,
        step=SimpleNamespace(load=lambda *_: told.append("load")),
        dense=SimpleNamespace(begin_step=lambda count, lengths: told.append(lengths)),
        without_whole_requests="all is read",
    )

    def hold_rows(whole: bool, count: int) -> None:
        device.program.is_dense = whole
        told.append(f"{count} rows in {'device' if whole else 'host'} memory")

    device.program.hold_rows = hold_rows
    rows = torch.tensor([1, 2])
    for lengths in (torch.tensor([64, 33]), torch.tensor([65, 34])):
        device.begin_step(StepBatch(rows, lengths, lengths, slots=rows))
    assert told == ["load", [64, 33], "load", "2 rows in host memory", "load"]
    assert "2 running requests are longer than the GPU's memory holds: all is read" in caplog.text


@pytest.mark.parametrize(
    ("args", "ranks"),
    [
        ({}, 1),
        ({"tp_size": 4}, 4),
        ({"tp_size": 8, "nnodes": 2}, 4),
        ({"dp_size": 2}, 2),  # each replica is a rank of its own
        ({"dp_size": 2, "tp_size": 2}, 4),
        ({"dp_size": 2, "tp_size": 2, "enable_dp_attention": True}, 2),
    ],
)
def test_host_memory_is_shared_by_all_ranks_and_replicas_of_a_host(args: dict[str, Any], ranks: int) -> None:
    plain = {"tp_size": 1, "pp_size": 1, "nnodes": 1, "dp_size": 1, "enable_dp_attention": False}
    assert ranks_on_this_host(SimpleNamespace(**plain | args)) == ranks
