"""NIXL registers a KV cache in host memory as DRAM, and any other cache as SGLang says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.nixl.conn import NixlKVManager

from sglang_hybrid.integration import memory_kinds
from sglang_hybrid.integration.host_kv_pool import HostKVPool


class Registered(Exception):
    """Raised by the stand-in base class, so that the manager's start ends after its arguments are changed."""


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Any:
    def stop(_manager: Any, args: Any, *_: Any) -> None:
        raise Registered(args.kv_data_mem_kinds)

    def of(pool: bool, gpu: bool) -> Any:
        monkeypatch.setattr(CommonKVManager, "__init__", stop)
        monkeypatch.setattr(HostKVPool, "in_this_process", pool)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        args = SimpleNamespace(kv_data_ptrs=[1, 2, 3], kv_data_mem_kinds=["VRAM"] * 3)
        with pytest.raises(Registered) as registered:
            NixlKVManager(args, None, None)
        return registered.value.args[0]

    return of


@pytest.mark.parametrize(("pool", "gpu"), [(True, True), (True, False), (False, False)])
def test_a_cache_in_host_memory_is_dram(kinds: Any, pool: bool, gpu: bool) -> None:
    assert kinds(pool, gpu) == ["DRAM"] * 3


def test_a_stock_cache_on_a_gpu_stays_what_it_is(kinds: Any) -> None:
    assert kinds(pool=False, gpu=True) == ["VRAM"] * 3


@pytest.mark.parametrize("gpu", [False, True])
def test_page_numbers_are_not_sent_from_pinned_memory_where_there_is_none(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    sender = SimpleNamespace(supports_host_tensor_indices=True)  # as Mooncake's sender has since SGLang 0.5.23
    memory_kinds.send_without_pinned_memory(None, sender)
    assert sender.supports_host_tensor_indices == gpu
