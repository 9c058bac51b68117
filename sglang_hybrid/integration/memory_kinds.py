"""Kinds of memory that transfers use. SGLang takes GPU memory and pinned memory for granted.

NIXL wants to be told what kind of memory it registers, and SGLang says GPU memory, whatever it is.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_hybrid.integration.host_kv_pool import HostKVPool


def tell_memory_kinds(_manager: Any, kv_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before ``NixlKVManager`` registers this process's KV cache."""
    if HostKVPool.in_this_process or not torch.cuda.is_available():
        kv_args.kv_data_mem_kinds = ["DRAM"] * len(kv_args.kv_data_ptrs)


def send_without_pinned_memory(_result: Any, sender: Any, *_args: Any, **_kwargs: Any) -> None:
    """After a prefill instance made a sender: without a GPU it must not put page numbers into pinned memory.

    SGLang 0.5.23 does so for Mooncake and ends the scheduler process where there is no pinned memory.
    """
    if not torch.cuda.is_available():
        sender.supports_host_tensor_indices = False
