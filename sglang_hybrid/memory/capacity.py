"""How many tokens the host pool can hold, and the numbers to show when that is too few."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.config import HybridConfig

GIB = 1 << 30


class CapacityError(ValueError):
    """The pool does not fit; the message carries every number that led to that."""


@dataclass(frozen=True)
class KVShape:
    """What one token costs on this rank."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    itemsize: int

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * self.itemsize


def host_pool_bytes(config: HybridConfig, shape: KVShape, available: int, ranks: int) -> int:
    """Bytes of host memory for this rank's pool.

    ``available``: memory of this host that is free now; ``ranks``: processes that share it.
    Raises CapacityError when the configuration asks for more than there is, or when what
    it gives is less than one attention budget per request.
    """
    asked = config.host_memory_bytes(available)
    if asked > available:
        raise CapacityError(
            f"host_memory={config.host_memory} asks for {asked / GIB:.2f} GiB, but only {available / GIB:.2f} GiB "
            "of host memory are available: lower host_memory or free memory"
        )
    share = asked // ranks
    needed = (config.budget_tokens + 2 * config.block_tokens) * shape.bytes_per_token
    if share < needed:
        raise CapacityError(
            f"the host pool would hold {share // shape.bytes_per_token} tokens ({share / GIB:.3f} GiB per rank, "
            f"{shape.bytes_per_token} bytes per token: {shape.layers} layers x {shape.kv_heads} KV heads x "
            f"{shape.key_dim} + {shape.value_dim} channels x {shape.itemsize} bytes), less than one budget of "
            f"{config.budget_tokens} tokens: raise host_memory (now {config.host_memory}; "
            f"{available / GIB:.2f} GiB are available, shared by {ranks} rank(s)) to at least "
            f"{needed * ranks / GIB:.3f} GiB, or lower budget_tokens"
        )
    return share
