"""How many rows fit: what each side keeps in GPU memory for a row, against one limit for both.

Stock keeps every token's keys and values on the GPU. Hybrid keeps resident slots for a row, digests and sketches for
every block of it, and all keys and values in host memory. Model weights are the same on both sides and do
not count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_hybrid.blocks import compact_bytes

GB = 10**9


@dataclass(frozen=True)
class KVModel:
    """What a token's keys and values take."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int

    @classmethod
    def of(cls, directory: Path, itemsize: int) -> KVModel:
        config = json.loads((directory / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            itemsize=itemsize,
        )

    @property
    def token_bytes(self) -> int:
        return self.layers * self.kv_heads * 2 * self.head_dim * self.itemsize


@dataclass(frozen=True)
class Limits:
    gpu_bytes: int  # for everything that grows with rows or tokens
    host_bytes: int  # for hybrid's pool
    most_rows: int


@dataclass(frozen=True)
class Selected:
    """The settings of hybrid that decide what a row takes."""

    resident_tokens: int
    sketch_channels: int
    block_tokens: int = 32
    compact: bool = False  # digest_dtype=int8

    def block_bytes(self, model: KVModel) -> int:
        """Of one layer and one KV head."""
        return self.block_tokens * 2 * model.head_dim * model.itemsize

    def digest_bytes(self, model: KVModel) -> int:
        """Of one block: minimum and maximum, and four bits a token for each channel of the sketch."""
        channels = min(self.sketch_channels, model.head_dim)
        whole = 2 * model.head_dim * model.itemsize
        digest = compact_bytes(model.head_dim, channels) if self.compact else whole
        return digest + self.block_tokens * channels // 2


@dataclass(frozen=True)
class Capacity:
    rows: int
    limited_by: str
    why: str  # the arithmetic, for a person


def stock_capacity(model: KVModel, limits: Limits, tokens: int) -> Capacity:
    """Rows of ``tokens`` tokens, prompt and answer, in SGLang's own pool."""
    total = stock_tokens(model, limits)
    return _least(
        {"GPU memory": total // tokens, "--most-rows": limits.most_rows},
        f"{limits.gpu_bytes / GB:.4g} GB / {model.token_bytes} B a token = {total} tokens, / {tokens} a row",
    )


def stock_tokens(model: KVModel, limits: Limits) -> int:
    return limits.gpu_bytes // model.token_bytes


def hybrid_capacity(model: KVModel, limits: Limits, selected: Selected, tokens: int) -> Capacity:
    blocks = -(-tokens // selected.block_tokens)
    resident = _slot_bytes(model, selected)
    digests = model.layers * model.kv_heads * blocks * selected.digest_bytes(model)
    row = resident + digests
    on_gpu = (limits.gpu_bytes - resident) // row  # one row's slots take what padding writes
    in_host = limits.host_bytes // (blocks * selected.block_tokens * model.token_bytes)
    return _least(
        {"GPU memory": max(on_gpu, 0), "host memory": in_host, "--most-rows": limits.most_rows},
        f"a row: {resident / 1e6:.1f} MB of resident slots + {digests / 1e6:.1f} MB of digests and sketches; "
        f"{limits.gpu_bytes / GB:.4g} GB hold {on_gpu} (and one for padding); "
        f"{limits.host_bytes / GB:.4g} GB of host memory hold {in_host}",
    )


def hybrid_server_bytes(model: KVModel, selected: Selected, rows: int, pool_tokens: int) -> int:
    """What a server takes at its start, which has slots for ``rows`` and digests for its whole pool."""
    digests = model.layers * model.kv_heads * (pool_tokens // selected.block_tokens) * selected.digest_bytes(model)
    return (rows + 1) * _slot_bytes(model, selected) + digests


def _slot_bytes(model: KVModel, selected: Selected) -> int:
    blocks = selected.resident_tokens // selected.block_tokens
    return model.layers * model.kv_heads * blocks * selected.block_bytes(model)


def _least(rows: dict[str, int], why: str) -> Capacity:
    limited_by = min(rows, key=lambda name: rows[name])
    return Capacity(rows[limited_by], limited_by, why)
