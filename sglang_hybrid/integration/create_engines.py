"""Creates the engines of a model runner: the torch engine, and a faster one if settings, model and host allow it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.base import Engine, ModelFacts
from sglang_hybrid.engines.choice import unsupported_by_cpu_engine
from sglang_hybrid.engines.cpu import CpuEngine
from sglang_hybrid.engines.cuda import engine as cuda
from sglang_hybrid.engines.torch import TorchEngine
from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.integration.miss_server import (
    checked_geometry,
    create_miss_server,
    geometry_of,
    has_kernel,
    start_worker,
)
from sglang_hybrid.integration.predictor import identity
from sglang_hybrid.integration.ranks import kv_heads_of
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.integration.slot_steps import rank_steps
from sglang_hybrid.ops.cpu import NativeError, library
from sglang_hybrid.ops.reference import FP8
from sglang_hybrid.policies.registry import ModelPart, keeps_codes_in_slots, policy_named
from sglang_hybrid.policies.scout.corrections_file import Calibrated
from sglang_hybrid.policies.scout.profile import Profile
from sglang_hybrid.policies.scout.tuning import tuning_of

logger = logging.getLogger("sglang.srt.hybrid")


def create_engines(
    config: HybridConfig,
    profile: Profile | None,
    pool: HostKVPool,
    model_runner: Any,
    calibrated: Calibrated | None = None,
) -> tuple[TorchEngine, Engine | None]:
    """Create the torch engine and, if possible, a faster one (else None). Start a worker if the engine in use needs it.

    ``calibrated`` has the steps of codes, if slots keep codes.

    Raise Refusal if CUDA graphs or an FP8 cache on a GPU need CUDA kernels that do not support these settings, or if a
    worker cannot be started.
    """
    steps = rank_steps(calibrated, pool, kv_heads_of(model_runner))
    model = replace(facts_of(model_runner), code_steps=steps)
    fast: Engine | None
    if torch.device(pool.device).type == "cuda":
        fast = _cuda_engine(config, profile, pool, model, model_runner)
    else:
        fast = _cpu_engine(config, pool, model, model_runner)
    needs_worker = fast is None and policy_named(config.policy).needs.worker
    misses = create_miss_server(config, pool, model_runner) if needs_worker else None
    return TorchEngine(config, pool, model, misses), fast


def facts_of(model_runner: Any) -> ModelFacts:
    args, model = model_runner.server_args, model_runner.model
    scales = {float(module.scaling) for module in model.modules() if isinstance(module, RadixAttention)}
    logits = getattr(model, "logits_processor", None)
    query_heads = model_runner.model_config.get_num_attention_heads(args.tp_size)
    return ModelFacts(
        req_to_token=model_runner.req_to_token_pool.req_to_token,
        group=query_heads // model_runner.token_to_kv_pool.head_num,
        dtype=model_runner.dtype,
        scale=scales.pop() if len(scales) == 1 else None,
        cuda_graphs=not args.disable_cuda_graph,
        logits=logits if isinstance(logits, torch.nn.Module) else None,
        one_batch=args.pp_size == 1 and not args.enable_two_batch_overlap and not args.enable_pdmux,
        admits_pages=args.disaggregation_mode == "decode",
        part=ModelPart(lambda: identity(model_runner), kv_heads_of(model_runner)),
    )


def _cuda_engine(
    config: HybridConfig, profile: Profile | None, pool: HostKVPool, model: ModelFacts, model_runner: Any
) -> Engine | None:
    if (why := cuda.unsupported_reason(config, pool, model)) is not None:
        if pool.dtype == FP8:
            raise Refusal(
                f"on a GPU an FP8 KV cache is read by CUDA kernels only, and they do not do this ({why}): change that, "
                "or use --kv-cache-dtype bfloat16"
            )
        if model.cuda_graphs:
            raise Refusal(f"the CUDA kernels do not do this ({why}): serve it in plain torch, --disable-cuda-graph")
        logger.warning("attention is computed in plain torch, which is slow: %s", why)
        return None
    if keeps_codes_in_slots(config) and model.code_steps is None:
        raise Refusal(
            "scout.slot_dtype=int8 needs the range of every channel, from a calibration or a new profile, and there is "
            "none: serve with profile=auto, make the profile anew, or serve with scout.slot_dtype=model"
        )
    worker = None
    if config.worker != "none" and policy_named(config.policy).needs.worker:
        geometry = checked_geometry(config, pool, model_runner)
        assert geometry is not None  # the device's kernels have fewer shapes than the CPU's
        worker = (*start_worker(config, pool, model_runner, geometry, cuda.WORKER_SPIN_US), geometry)
    tuning = tuning_of(config, pool.layer_num, profile)
    engine = cuda.CudaEngine(config, tuning, profile.facts.rates if profile else None, pool, model, worker)
    pool.admission = engine.admission
    return engine


def _cpu_engine(config: HybridConfig, pool: HostKVPool, model: ModelFacts, model_runner: Any) -> Engine | None:
    if why := why_not_native(config, pool, model, model_runner):
        logger.info("attention is computed in plain torch, more slowly than by the native kernels: %s", why)
        return None
    geometry, threads = geometry_of(config, pool, model_runner), torch.get_num_threads()
    engine = CpuEngine(config, pool, geometry, model, threads)
    pool.kernels = engine.kernels
    logger.info(
        "attention is computed by native kernels in this process, %d threads: no worker is started, it would take "
        "the same cores (worker=start starts one)", threads,
    )  # fmt: skip
    return engine


def why_not_native(config: HybridConfig, pool: HostKVPool, model: ModelFacts, model_runner: Any) -> str | None:
    """Return why the native CPU engine cannot serve on a host without a GPU, in words; None if it can."""
    try:
        library()
        geometry = geometry_of(config, pool, model_runner)
    except NativeError as error:
        return str(error)
    if not has_kernel(geometry) or pool.v_head_dim != pool.head_dim:
        return f"there is no kernel for head_dim {pool.head_dim} and {geometry.group} query heads per KV head"
    if pool.dtype not in (model.dtype, FP8):
        return f"the KV cache is {pool.dtype}, the model {model.dtype}"
    return unsupported_by_cpu_engine(config, pool.head_dim)
