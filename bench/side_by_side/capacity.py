"""Number of rows that fit in GPU memory with stock and with hybrid, under the same limit.

Stock keeps every token's keys and values on the GPU. Hybrid keeps resident slots for a row, digests and sketches for
every block of the row, two layers of one context during prefill, and all keys and values in host memory. Bytes of
hybrid come from the functions that a server calls. Model weights are the same on both sides and are not counted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.memory.capacity import KVShape
from sglang_hybrid.memory.device_capacity import DeviceBytes, device_bytes, page_bytes

GB = 10**9


@dataclass(frozen=True)
class KVModel:
    """Shape of a model's KV cache, from which its bytes are computed."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    context: int = 131072  # tokens of the longest request

    @classmethod
    def of(cls, directory: Path, itemsize: int) -> KVModel:
        config = json.loads((directory / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            itemsize=itemsize,
            context=config["max_position_embeddings"],
        )

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim, self.head_dim, self.itemsize)

    @property
    def token_bytes(self) -> int:
        return self.shape.bytes_per_token


@dataclass(frozen=True)
class Limits:
    gpu_bytes: int  # GPU memory for everything that grows with rows or tokens
    host_bytes: int  # host memory for hybrid's pool
    most_rows: int | None  # maximum number of rows; None: as many as memory holds


@dataclass(frozen=True)
class Capacity:
    rows: int
    limited_by: str
    why: str  # the arithmetic, as text for a person


def stock_capacity(model: KVModel, limits: Limits, tokens: int) -> Capacity:
    """Return how many rows of ``tokens`` tokens (prompt and answer) fit in SGLang's own pool."""
    total = stock_tokens(model, limits)
    return _least(
        {"GPU memory": total // tokens},
        limits,
        f"{limits.gpu_bytes / GB:.4g} GB / {model.token_bytes} B a token = {total} tokens, / {tokens} a row",
    )


def stock_tokens(model: KVModel, limits: Limits) -> int:
    return limits.gpu_bytes // model.token_bytes


def hybrid_capacity(model: KVModel, limits: Limits, config: HybridConfig, tokens: int, device: str) -> Capacity:
    blocks = -(-tokens // BLOCK_TOKENS)
    one = _taken(model, config, 1, device)
    digests = blocks * page_bytes(config, model.shape, device).total
    # one more row of slots receives the writes of padding
    on_gpu = (limits.gpu_bytes - one.staging - one.resident) // (one.resident + digests)
    in_host = limits.host_bytes // (blocks * BLOCK_TOKENS * model.token_bytes)
    return _least(
        {"GPU memory": max(on_gpu, 0), "host memory": in_host},
        limits,
        f"a row: {one.resident / 1e6:.1f} MB of resident slots and scores + {digests / 1e6:.1f} MB of digests and "
        f"sketches; {limits.gpu_bytes / GB:.4g} GB hold {on_gpu}, one for padding and {one.staging / 1e6:.1f} MB for "
        f"prefill; {limits.host_bytes / GB:.4g} GB of host memory hold {in_host}",
    )


def hybrid_server_bytes(model: KVModel, config: HybridConfig, rows: int, pool_tokens: int, device: str) -> int:
    """Return the GPU memory that a hybrid server allocates at its start: slots for ``rows``, digests for its pool."""
    taken = _taken(model, config, rows + 1, device)
    pages = pool_tokens // BLOCK_TOKENS
    return taken.resident + taken.staging + pages * page_bytes(config, model.shape, device).total


def _taken(model: KVModel, config: HybridConfig, rows: int, device: str) -> DeviceBytes:
    found = device_bytes(config, model.shape, rows, model.context)
    return DeviceBytes(found.slots, found.scores) if device == "cpu" else found  # nothing is staged on a CPU


def _least(rows: dict[str, int], limits: Limits, why: str) -> Capacity:
    if limits.most_rows:
        rows = rows | {"--most-rows": limits.most_rows}
    limited_by = min(rows, key=lambda name: rows[name])
    return Capacity(rows[limited_by], limited_by, why)
