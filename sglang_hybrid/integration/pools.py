"""Replace SGLang's KV pool: the host's memory gives its capacity and holds keys and values.

The hooks do not change servers with another attention backend, except for the page allocator on a CPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_hybrid import container, env
from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig, config_from_environment
from sglang_hybrid.integration import BACKEND_NAME, console_events
from sglang_hybrid.integration.kv_scales import FP8_FLAG
from sglang_hybrid.integration.refusals import refuse_model, told
from sglang_hybrid.memory.capacity import GIB, KVShape, host_pool_bytes
from sglang_hybrid.memory.device_capacity import DevicePlan, page_bytes, plan_device, rows_of
from sglang_hybrid.ops.reference import FP8

logger = logging.getLogger("sglang.srt.hybrid")


def _is_hybrid(configurator: Any) -> bool:
    return bool(configurator.server_args.attention_backend == BACKEND_NAME)


def kv_shape(model_config: Any, tp_size: int, kv_dtype: torch.dtype) -> KVShape:
    kv_heads = model_config.get_num_kv_heads(tp_size)
    return KVShape(
        layers=model_config.num_hidden_layers,
        kv_heads=kv_heads,
        key_dim=model_config.head_dim,
        value_dim=model_config.v_head_dim,
        itemsize=kv_dtype.itemsize,
        group=model_config.get_num_attention_heads(tp_size) // kv_heads,
    )


def ranks_on_this_host(args: Any) -> int:
    """Return the number of processes on this host that have a pool. Replicas of data-parallel attention share them."""
    replicas = 1 if args.enable_dp_attention else args.dp_size
    return int(max(1, args.tp_size * args.pp_size // args.nnodes) * replicas)


def check_capacity(model_config: Any, args: Any) -> None:
    """Raise CapacityError early, in the process that the user started, if the host pool does not fit.

    Export the available memory to the ranks, because each rank sees only what earlier ranks have left.
    """
    free = container.memory().available
    dtype = FP8 if args.kv_cache_dtype == FP8_FLAG else model_config.dtype
    shape = kv_shape(model_config, args.tp_size, dtype)
    host_pool_bytes(config_from_environment(), shape, free, ranks_on_this_host(args))
    os.environ[env.MEMORY_AT_START.name] = str(free)


# Stands in for the dtype of an FP8 cache during one check of SGLang: a dtype of the same size that passes the check.
_IN_DISGUISE = torch.uint8


def configure(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """Let FP8 caches pass on a CPU, where SGLang refuses them except with its AMX backend. Ours reads FP8 on every CPU.

    The dtype is hidden from SGLang's check, which comes first, and restored when SGLang asks for the available memory.
    """
    if not _is_hybrid(configurator) or configurator.device != "cpu" or configurator.kv_cache_dtype != FP8:
        return original(configurator, **kwargs)
    configurator.kv_cache_dtype = _IN_DISGUISE
    try:
        return original(configurator, **kwargs)
    finally:
        configurator.kv_cache_dtype = FP8


@told()
def available_bytes(original: Callable[[Any, int], int], configurator: Any, pre_model_load_memory: int) -> int:
    """Return the bytes for the KV cache: what the host provides, limited by the digests that the device can hold."""
    if not _is_hybrid(configurator):
        return original(configurator, pre_model_load_memory)
    if configurator.kv_cache_dtype == _IN_DISGUISE:
        configurator.kv_cache_dtype = FP8
    config = config_from_environment()
    refuse_model(
        configurator.model,
        configurator.model_config,
        configurator.kv_cache_dtype,
        str(configurator.device),
        config.policy,
    )
    args = configurator.server_args
    from sglang_hybrid.integration.slot_dtype import settled  # imports parts of SGLang that load after this module

    config = settled(config, configurator.model, args, str(configurator.device), configurator.kv_cache_dtype)
    shape = kv_shape(configurator.model_config, args.tp_size, configurator.kv_cache_dtype)
    ranks = ranks_on_this_host(args)
    free = container.memory().available
    share = host_pool_bytes(config, shape, free, ranks, env.MEMORY_AT_START.get())

    if configurator.device != "cpu":
        on_device = original(configurator, pre_model_load_memory)
        share = min(
            share,
            _plan_device(on_device, config, shape, configurator).pages * BLOCK_TOKENS * shape.bytes_per_token,
        )
    of_page = page_bytes(config, shape, str(configurator.device))
    logger.info(
        "on the model's device: %.1f %% of the KV cache (bytes of each token: %.1f of digests, %.1f of sketches, "
        "%.1f of codes)", 100 * of_page.total / (BLOCK_TOKENS * shape.bytes_per_token),
        *(part / BLOCK_TOKENS for part in (of_page.digests, of_page.sketches, of_page.codes)),
    )  # fmt: skip
    logger.info(
        "host pool: room for %d tokens in %.2f GiB (%.2f GiB of host memory available, %d rank(s), %d bytes per token)",
        share // shape.bytes_per_token, share / GIB, free / GIB, ranks, shape.bytes_per_token,
    )  # fmt: skip
    return share


def _plan_device(available: int, config: HybridConfig, shape: KVShape, configurator: Any) -> DevicePlan:
    args = configurator.server_args
    arriving = (args.disaggregation_decode_extra_slots or 0) if args.disaggregation_mode == "decode" else 0
    plan = plan_device(
        available, config, shape, rows_of(args.max_running_requests, arriving), configurator.model_config.context_len,
        device=configurator.device, cuda_graphs=not args.disable_cuda_graph,
    )  # fmt: skip
    logger.info(
        "device memory: %.2f GiB for the resident blocks of %d rows, digests for at most %d tokens",
        plan.taken.resident / GIB, plan.rows, plan.pages * BLOCK_TOKENS,
    )  # fmt: skip
    return plan


def build_kv_pool(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    if _is_hybrid(configurator):
        from sglang_hybrid.integration.host_kv_pool import HostKVPool

        kwargs["mha_pool_class"] = HostKVPool
        HostKVPool.model_dtype = configurator.model_config.dtype
        kwargs.pop("quant_method", None)  # quantises FP8 on a CPU, for SGLang's layout
    return original(configurator, **kwargs)


def enable_fused_set_kv_buffer(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """Disable kernels that write keys and values during rotary embedding, to a device pool of SGLang's layout."""
    from sglang_hybrid.integration.host_kv_pool import HostKVPool

    return not HostKVPool.in_this_process and original(*args, **kwargs)


def build_allocator(
    original: Callable[..., Any], configurator: Any, *, sizes: Any, token_to_kv_pool: Any, **kwargs: Any
) -> Any:
    """Replace SGLang's page allocator on a CPU, where it cannot run.

    This applies to every attention backend: a prefill instance on a CPU needs our allocator as well.
    """
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    if _is_hybrid(configurator):
        console_events.tell_pool(configurator, sizes.max_total_num_tokens, token_to_kv_pool)
    allocator = original(configurator, sizes=sizes, token_to_kv_pool=token_to_kv_pool, **kwargs)
    if torch.device(configurator.device).type == "cpu" and type(allocator) is PagedTokenToKVPoolAllocator:
        allocator = _cpu_allocator(configurator, sizes.max_total_num_tokens, token_to_kv_pool)
    return allocator


def _cpu_allocator(configurator: Any, tokens: int, pool: Any) -> Any:
    from sglang_hybrid.integration.cpu_allocator import CpuPagedAllocator

    return CpuPagedAllocator(
        tokens,
        page_size=configurator.page_size,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
        kvcache=pool,
        # as SGLang does: transfers need runs of neighbouring pages
        need_sort=configurator.server_args.disaggregation_mode != "null",
    )
