"""NIXL wants to be told what kind of memory it registers. SGLang says GPU memory, whatever it is."""

from __future__ import annotations

from typing import Any

import torch

from sglang_hybrid.integration.host_kv_pool import HostKVPool


def tell_memory_kinds(_manager: Any, kv_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before ``NixlKVManager`` registers this process's KV cache."""
    if HostKVPool.in_this_process or not torch.cuda.is_available():
        kv_args.kv_data_mem_kinds = ["DRAM"] * len(kv_args.kv_data_ptrs)
