"""The rank of this process among the ranks of a server, and values that all ranks agree on."""

from __future__ import annotations

from typing import Any

import torch

from sglang_hybrid.metrics import Rank


def rank_of(model_runner: Any) -> Rank:
    """Return this process's rank. SGLang before 0.5.21 keeps it in the model runner, later versions per process."""
    ranks = model_runner.ps if hasattr(model_runner, "ps") else _parallel()
    replica = 0 if model_runner.server_args.enable_dp_attention else getattr(ranks, "dp_rank", None)
    return Rank(ranks.tp_rank, replica or 0)


def kv_heads_of(model_runner: Any) -> slice:
    """Return the KV heads of this rank, as a slice of the whole model's KV heads."""
    heads = model_runner.token_to_kv_pool.head_num
    # with more ranks than KV heads several ranks share one
    shared = max(1, model_runner.server_args.tp_size // model_runner.model_config.get_total_num_kv_heads())
    first = rank_of(model_runner).rank // shared * heads
    return slice(first, first + heads)


def smallest_of_ranks(model_runner: Any, value: int) -> int:
    """Return the smallest ``value`` that a rank of this model has. Every rank has to call this."""
    if model_runner.server_args.tp_size == 1:
        return value
    group = model_runner.tp_group if hasattr(model_runner, "tp_group") else _parallel().tp_group
    smallest = torch.tensor([value])
    torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(smallest)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
