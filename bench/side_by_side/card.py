"""Computes how many requests fit on a card of a given memory, by the arithmetic that a hybrid server uses."""

from __future__ import annotations

from dataclasses import dataclass

from bench.side_by_side.capacity import GB, KVModel
from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.memory.capacity import CapacityError
from sglang_hybrid.memory.device_capacity import plan_device, rows_of

CONTEXT_BYTES = 600_000_000  # CUDA's context and libraries in a server: SGLang's free memory is the rest
SPARE_TOKENS = 4 * BLOCK_TOKENS  # per request: SGLang rounds up, and keeps some pages free
HOST_SHARE = 0.85  # share of the host's available memory that a pool may take


@dataclass(frozen=True)
class Fit:
    """Number of requests of one length that fit, and the limits that decided it."""

    requests: int
    by_gpu: int
    by_host: int
    available: int  # bytes of GPU memory for slots, digests and staging
    why: str


def fit_of(
    kv: KVModel, config: HybridConfig, tokens: int, most: int, *, card: int, weights: int, reserve: int, host: int
) -> Fit:
    """Return how many requests of ``tokens`` tokens fit, at most ``most``.

    ``tokens`` includes the answer and SPARE_TOKENS. All of ``card``, ``host``, ``weights`` and ``reserve`` are bytes:
    the GPU's memory in all, the host's available memory, and what weights and the reserve take of the GPU's.
    """
    available = card - CONTEXT_BYTES - weights - reserve
    by_gpu = 0
    for requests in range(1, most + 1):
        try:
            plan = plan_device(available, config, kv.shape, rows_of(requests), tokens, device="cuda", cuda_graphs=True)
        except CapacityError:
            break
        if plan.pages * BLOCK_TOKENS < requests * tokens:
            break
        by_gpu = requests
    by_host = int(host * HOST_SHARE) // (tokens * kv.token_bytes)
    why = (
        f"{card / GB:.2f} GB - {CONTEXT_BYTES / GB:.2f} of CUDA - {weights / GB:.2f} of weights - {reserve / GB:.2f} "
        f"of reserve = {available / GB:.2f} GB hold {by_gpu} of {most} requests of {tokens} tokens; "
        f"{host / GB:.0f} GB of host memory hold {by_host} of {tokens * kv.token_bytes / GB:.1f} GB each"
    )
    return Fit(min(by_gpu, by_host, most), by_gpu, by_host, available, why)


def memory_fraction(card: int, reserve: int) -> float:
    """Return the ``--mem-fraction-static`` that leaves ``reserve`` bytes.

    SGLang leaves ``(1 - fraction)`` of the memory that is free before the weights are loaded.
    """
    return round(1 - reserve / (card - CONTEXT_BYTES), 3)
