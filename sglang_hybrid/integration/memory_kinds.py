"""Correct the kinds of memory that SGLang's KV transfers assume: GPU memory and pinned memory.

NIXL has to know in which kind of memory the KV cache is, and SGLang always says GPU memory.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_hybrid.integration.host_kv_pool import HostKVPool


def tell_memory_kinds(_manager: Any, kv_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Declare a KV cache in host memory as such. Hook before ``NixlKVManager.__init__``, which registers the cache."""
    if HostKVPool.in_this_process or not torch.cuda.is_available():
        kv_args.kv_data_mem_kinds = ["DRAM"] * len(kv_args.kv_data_ptrs)


def send_without_pinned_memory(_result: Any, sender: Any, *_args: Any, **_kwargs: Any) -> None:
    """Keep a sender from putting page numbers into pinned memory on a host without a GPU.

    Hook after ``CommonKVSender.__init__`` of a prefill instance. SGLang 0.5.23 uses pinned memory for Mooncake, and its
    scheduler process ends if there is none.
    """
    if not torch.cuda.is_available():
        sender.supports_host_tensor_indices = False
