"""Create the miss server that the configuration asks for: it computes attention over missed blocks of the pool."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from sglang_hybrid import env
from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.integration import console_events
from sglang_hybrid.integration.gpu_node import gpu_node
from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.integration.pools import ranks_on_this_host
from sglang_hybrid.integration.ranks import rank_of
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.integration.scheduler_cores import SchedulerCores
from sglang_hybrid.metrics import Rank, WorkerMetrics
from sglang_hybrid.ops.cpu import NativeError, library, variants
from sglang_hybrid.ops.cpu.dtypes import code_of
from sglang_hybrid.ops.cpu.local import LocalAttention
from sglang_hybrid.ops.cpu.structs import MASKS, VALUE_SUMS, Geometry
from sglang_hybrid.policies.registry import policy_named
from sglang_hybrid.protocol import cores
from sglang_hybrid.protocol.messages import SPIN_US, ThreadPlan
from sglang_hybrid.worker.local_attention import LocalMisses
from sglang_hybrid.worker.miss_server import MissServer
from sglang_hybrid.worker.remote_attention import WorkerMisses
from sglang_hybrid.worker.supervisor import Supervisor, WorkerError, WorkerSettings
from sglang_hybrid.worker.torch_attention import TorchMisses

_SILENCE_SECONDS = 2.0


def create_miss_server(config: HybridConfig, pool: HostKVPool, model_runner: Any) -> MissServer:
    """Create the miss server, and start a worker if the configuration wants one. Raise Refusal with what to change."""
    geometry = checked_geometry(config, pool, model_runner)
    if geometry is None:
        return TorchMisses()
    local = LocalAttention(pool.region.address, geometry, env.WORKER_TASK_BLOCKS.get(), len(os.sched_getaffinity(0)))
    if config.worker == "none":
        return LocalMisses(local)
    supervisor, metrics = start_worker(config, pool, model_runner, geometry)
    return WorkerMisses(supervisor, local, config.worker_deadline_ms / 1000, metrics)


def checked_geometry(config: HybridConfig, pool: HostKVPool, model_runner: Any) -> Geometry | None:
    """Return the pool's geometry; None if no CPU kernel has its shape. Raise Refusal if the settings need kernels."""
    try:
        library()
        geometry = geometry_of(config, pool, model_runner)
    except NativeError as error:
        raise Refusal(str(error)) from error
    if (variant := env.CPU_VARIANT.get()) and variant not in variants():
        raise Refusal(f"{env.CPU_VARIANT.name}={variant}: this machine has {', '.join(variants())}")
    if has_kernel(geometry) and pool.v_head_dim == pool.head_dim:
        return geometry
    if config.worker in ("auto", "none"):
        return None
    raise Refusal(
        f"the CPU kernels take head_dim 64, 96, 128 or 256 and at most 16 query heads per KV head, this model has "
        f"{geometry.head_dim} (values: {pool.v_head_dim}) and {geometry.group}: serve it with --hybrid worker=none"
    )


def start_worker(
    config: HybridConfig, pool: HostKVPool, model_runner: Any, geometry: Geometry, spin_us: int | None = None
) -> tuple[Supervisor, WorkerMetrics]:
    """Start this rank's worker, or attach to a running one. Raise Refusal if that fails.

    ``spin_us``: the least time in microseconds that the worker stays awake after a post.
    """
    rank = rank_of(model_runner)
    ranks = ranks_on_this_host(model_runner.server_args)
    own = config.worker in ("auto", "start")
    named = config.worker.replace("{rank}", str(rank.rank)).replace("{replica}", str(rank.replica))
    settings = WorkerSettings(
        directory=None if own else Path(named),
        plan=plan_of(config, local_index(rank, model_runner.server_args), ranks, spin_us or 0, gpu_node(pool.device)),
        longest_pause_s=config.worker_restart_seconds,
        silence_s=max(_SILENCE_SECONDS, 4 * config.worker_deadline_ms / 1000),
    )
    supervisor = Supervisor(settings, geometry, pool.region.fd)
    metrics = WorkerMetrics(rank)
    supervisor.on_change = metrics.worker_is
    if torch.device(pool.device).type == "cuda":
        _keep_off_its_cores(supervisor, metrics)
    try:
        supervisor.start()
    except WorkerError as error:
        raise Refusal(f"{error}; --hybrid worker=none serves without one") from error
    console_events.tell_worker(supervisor)
    return supervisor, metrics


def _keep_off_its_cores(supervisor: Supervisor, metrics: WorkerMetrics) -> None:
    cores = SchedulerCores()

    def change(up: bool) -> None:
        metrics.worker_is(up)
        cores.leave(supervisor.link.planned.cores if up and supervisor.link else ())

    supervisor.on_change = change


def local_index(rank: Rank, args: Any) -> int:
    """Return the index of this rank among all ranks that share the host's cores."""
    of_replica = max(1, args.tp_size // args.nnodes)
    return int(rank.replica * of_replica + rank.rank % of_replica)


def geometry_of(config: HybridConfig, pool: HostKVPool, model_runner: Any) -> Geometry:
    """Return what the worker has to know about the pool. Raise NativeError if the kernels do not know its dtype."""
    needs = policy_named(config.policy).needs
    query_heads = model_runner.model_config.get_num_attention_heads(model_runner.server_args.tp_size)
    first_key, start = pool.k_buffer[0].data_ptr(), pool.region.address
    following = pool.k_buffer[1] if len(pool.k_buffer) > 1 else pool.v_buffer[0]
    return Geometry(
        rows=model_runner.req_to_token_pool.size,
        kv_heads=pool.head_num,
        group=query_heads // pool.head_num,
        head_dim=pool.head_dim,
        dtype=code_of(pool.dtype, model_runner.dtype),
        max_blocks=_longest_list(config, model_runner),
        layers=len(pool.k_buffer),
        pages=pool.k_buffer[0].shape[0],
        keys=first_key - start,
        values=pool.v_buffer[0].data_ptr() - start,
        layer_stride=following.data_ptr() - first_key,
        pool_bytes=pool.region.size,
        flags=(MASKS if needs.masks else 0) | (VALUE_SUMS if needs.value_sums else 0),
    )


def _longest_list(config: HybridConfig, model_runner: Any) -> int:
    """Return the maximum number of blocks that the policy posts for one KV head of a row."""
    if policy_named(config.policy).needs.long_lists:
        return -(-int(model_runner.req_to_token_pool.req_to_token.shape[1]) // BLOCK_TOKENS)
    return config.budget_tokens // BLOCK_TOKENS


def has_kernel(geometry: Geometry) -> bool:
    known = library().sh_variant_name(geometry.dtype, geometry.head_dim, None) is not None
    return known and geometry.group <= 16


def plan_of(config: HybridConfig, rank: int, ranks: int, spin_us: int = 0, near: int | None = None) -> ThreadPlan:
    """Return the thread plan of one rank. Ranks on one host share its cores evenly."""
    chosen = config.worker_cores
    threads = 0 if config.worker_threads == "auto" else config.worker_threads
    if ranks > 1 and chosen == "auto":
        placed = cores.place(cores.read_topology(), "auto", threads * ranks, 0, ranks)
        share = len(placed.cores) // ranks
        if share:
            chosen = cores.format_cpus(placed.cores[rank * share : (rank + 1) * share])
        else:
            threads = threads or 1
    return ThreadPlan(
        provider=config.worker_provider,
        threads=threads,
        task_blocks=env.WORKER_TASK_BLOCKS.get(),
        spin_us=max(SPIN_US, spin_us),
        cores=chosen,
        near=-1 if near is None else near,
    )
