"""SGLang's attention interface: translates its batches and hands over to ``HybridAttention``."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_hybrid.backend import HybridAttention, PrefillBatch
from sglang_hybrid.config import config_from_environment
from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.integration.miss_server import create_miss_server
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.memory.pages import page_table
from sglang_hybrid.policies.base import DecodeBatch, LayerCache

logger = logging.getLogger("sglang.srt.hybrid")


class HybridAttnBackend(AttentionBackend):  # type: ignore[misc]
    """One per model runner. State lives in the pool; this holds the batch of the current step."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, HostKVPool):
            raise Refusal(
                f"SGLang keeps this model's KV cache in a {type(pool).__name__}, which cannot be moved to host "
                "memory: serve it with another --attention-backend"
            )
        self._pool = pool
        self._req_to_token = model_runner.req_to_token_pool.req_to_token
        self._config = config_from_environment()
        # policy full attends to everything in this process
        misses = create_miss_server(self._config, pool, model_runner) if self._config.policy == "scout" else None
        self._attention = HybridAttention(self._config, misses)
        self._steps = 0
        self._batch: PrefillBatch | DecodeBatch | None = None
        settings = msgspec.structs.asdict(self._config)
        logger.info("hybrid attention: %s", " ".join(f"{key}={value}" for key, value in settings.items()))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Take a copy of all that the layers read: the scheduler prepares the next batch meanwhile."""
        lengths = forward_batch.seq_lens_cpu.tolist()
        table = page_table(
            self._req_to_token, forward_batch.req_pool_indices, max(lengths, default=0), self._config.block_tokens
        )
        if forward_batch.forward_mode.is_decode_or_idle():
            self._steps += 1
            self._batch = DecodeBatch(table, forward_batch.seq_lens.to(torch.int64), lengths, self._steps)
            self._attention.begin_decode(self._batch)
        else:
            self._batch = PrefillBatch(table, lengths, list(forward_batch.extend_seq_lens_cpu))

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> torch.Tensor:
        assert isinstance(self._batch, PrefillBatch)
        query = self._store(q, k, v, layer, forward_batch, save_kv_cache)
        new = sum(self._batch.new_tokens)  # SGLang may pad the batch beyond its real tokens
        out = query.new_zeros(query.shape[0], query.shape[1], layer.v_head_dim)
        out[:new] = self._attention.prefill(query[:new], self._cache(layer), self._batch, layer.scaling)
        return out.flatten(1)

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> torch.Tensor:
        assert isinstance(self._batch, DecodeBatch)
        query = self._store(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attention.decode(query, self._cache(layer), self._batch, layer.scaling).flatten(1)

    def _store(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool
    ) -> torch.Tensor:
        if save_kv_cache and k is not None:
            self._pool.set_kv_buffer(
                layer,
                forward_batch.out_cache_loc,
                k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
                v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            )
        return q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)

    def _cache(self, layer: Any) -> LayerCache:
        keys, values = self._pool.get_kv_buffer(layer.layer_id)
        index = layer.layer_id - self._pool.start_layer
        return LayerCache(keys, values, self._pool.digests.of_layer(index), index)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1
