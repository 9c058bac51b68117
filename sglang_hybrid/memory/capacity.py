"""Capacity of the host pool in tokens, and the refusal of a pool that does not fit or is too small."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.protocol.alignment import ALIGNMENT

MIB = 1 << 20
GIB = 1 << 30


class CapacityError(ValueError):
    """The KV cache does not fit in memory. The message has the numbers that show why, and what to change."""


@dataclass(frozen=True)
class KVShape:
    """Shape of the KV cache on one rank, from which the bytes of a token follow."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    itemsize: int
    group: int = 1  # query heads per KV head: determines the size of attention weights and last queries

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * self.itemsize


def host_pool_bytes(
    config: HybridConfig, shape: KVShape, available: int, ranks: int, at_start: int | None = None
) -> int:
    """Return the bytes that tokens can take in this rank's host pool.

    ``available``: bytes of this host's memory that are free now. ``at_start``: bytes that were free before any rank
    took its share; None: unknown. ``ranks``: number of processes that share the memory. Raise CapacityError if the
    configuration asks for more than is free, or if the pool is smaller than one attention budget.
    """
    asked = config.host_memory_bytes(available if at_start is None else at_start)
    # Other ranks may have taken their shares already. A percentage is limited to this percentage of what is free now,
    # because weights may have taken memory since the start.
    taken = min(asked // ranks, config.host_memory_bytes(available))
    if (asked if at_start is None else taken) > available:
        raise CapacityError(
            f"host_memory={config.host_memory} asks for {asked / GIB:.2f} GiB, but only {available / GIB:.2f} GiB "
            "of host memory are available: lower host_memory or free memory"
        )
    # one page takes the writes of padding tokens; each layer's two buffers end on an alignment boundary
    overhead = BLOCK_TOKENS * shape.bytes_per_token + 2 * shape.layers * ALIGNMENT
    share = taken - overhead
    needed = config.budget_tokens * shape.bytes_per_token
    if share < needed:
        at_least = math.ceil((needed + overhead) * ranks / MIB)
        raise CapacityError(
            f"host_memory={config.host_memory} gives a pool of {max(share, 0) // shape.bytes_per_token} tokens, less "
            f"than one budget of {config.budget_tokens}: raise host_memory to at least {at_least}MiB or lower "
            f"budget_tokens. A token takes {shape.bytes_per_token} bytes ({shape.layers} layers x {shape.kv_heads} KV "
            f"heads x {shape.key_dim} + {shape.value_dim} channels x {shape.itemsize} bytes); "
            f"{available / GIB:.2f} GiB of host memory are available, shared by {ranks} rank(s)"
        )
    return share
