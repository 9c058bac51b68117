"""SGLang's pool for ``engines.CpuEngine``."""

from __future__ import annotations

from typing import Any

import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.choice import unsupported_by_cpu_engine
from sglang_hybrid.engines.cpu import CpuEngine
from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.integration.miss_server import geometry_of, has_kernel
from sglang_hybrid.native import NativeError, library
from sglang_hybrid.native.host import BlockSummaries


def why_not_native(config: HybridConfig, pool: HostKVPool, model_runner: Any) -> str | None:
    """Why a server without a GPU computes in plain torch, in words; None where native kernels do it."""
    try:
        library()
        geometry = geometry_of(config, pool, model_runner)
    except NativeError as error:
        return str(error)
    if not has_kernel(geometry) or pool.v_head_dim != pool.head_dim:
        return f"there is no kernel for head_dim {pool.head_dim} and {geometry.group} query heads per KV head"
    if model_runner.dtype != pool.store_dtype:
        return f"the KV cache is {pool.store_dtype}, the model {model_runner.dtype}"
    return unsupported_by_cpu_engine(config, pool.head_dim)


def create_cpu_engine(config: HybridConfig, pool: HostKVPool, model_runner: Any) -> CpuEngine:
    geometry = geometry_of(config, pool, model_runner)
    summaries = [_summaries(pool, layer) for layer in range(pool.layer_num)]
    return CpuEngine(config, pool.region.address, geometry, summaries, torch.get_num_threads())


def _summaries(pool: HostKVPool, layer: int) -> BlockSummaries:
    digests = pool.digests.of_layer(layer)
    if pool.sketches is None:
        return BlockSummaries(digests)
    sketch = pool.sketches.of_layer(layer)
    return BlockSummaries(digests, sketch.codes, sketch.channels)
