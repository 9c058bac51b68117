"""Run a text through the loaded model, outside any request: exact attention within the text, no KV cache or logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_hybrid.integration.decoder_layers import UnknownLayers

# layer id, queries [tokens, query heads, dim], keys and values [tokens, KV heads, dim] of this rank; queries and keys
# are rotated
Attended = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


class CausalAttention(AttentionBackend):  # type: ignore[misc]
    """SGLang attention backend in which one text attends to itself, without a KV cache."""

    def __init__(self, pool: Any, attended: Attended) -> None:
        """``pool`` is SGLang's KV pool: models read its dtype, nothing is written. Each layer calls ``attended``."""
        super().__init__()
        self.token_to_kv_pool = pool
        self._attended = attended

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, *_of_batch: Any, **more: Any
    ) -> torch.Tensor:
        """Return a layer's attention. Raise UnknownLayers for arguments that would be ignored, such as sinks."""
        if asked := [name for name, value in more.items() if value is not None and name != "save_kv_cache"]:
            raise UnknownLayers(f"its attention wants {', '.join(asked)}")
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        values = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        self._attended(layer.layer_id, queries, keys, values)
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=layer.scaling, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the part of ``model`` that has its decoder layers. Raise UnknownLayers if it is not where Llama's is."""
    decoder = getattr(model, "model", None)
    if not isinstance(decoder, torch.nn.Module) or not hasattr(decoder, "layers"):
        raise UnknownLayers(f"{type(model).__name__} keeps its layers elsewhere than in model.layers")
    return decoder


def run_text(model_runner: Any, tokens: Sequence[int], attended: Attended, first: int = 0) -> None:
    """Compute the decoder layers over ``tokens``. Every rank has to call this function with the same tokens.

    ``first`` is the position of the first token. Raise UnknownLayers for a model that is not built like Llama.
    """
    decoder = decoder_of(model_runner.model)
    ids = torch.tensor(list(tokens), device=model_runner.device)
    positions = torch.arange(first, first + len(ids), device=ids.device)
    backend = CausalAttention(model_runner.token_to_kv_pool, attended)
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
        decoder(ids, positions, _batch(ids, positions))


def _batch(ids: torch.Tensor, positions: torch.Tensor) -> ForwardBatch:
    """Return a prefill batch of one row, with the fields that layers read. SGLang's versions differ in these fields."""
    count, device = len(ids), ids.device
    lengths, zero = torch.tensor([count], device=device), torch.zeros(1, dtype=torch.int64, device=device)
    given = {
        "forward_mode": ForwardMode.EXTEND,
        "batch_size": 1,
        "input_ids": ids,
        "positions": positions,
        "req_pool_indices": zero,
        "seq_lens": lengths,
        "seq_lens_cpu": torch.tensor([count]),
        "seq_lens_sum": count,
        "orig_seq_lens": lengths.int(),
        "out_cache_loc": torch.zeros(count, dtype=torch.int64, device=device),
        "extend_num_tokens": count,
        "extend_seq_lens": lengths.int(),
        "extend_seq_lens_cpu": [count],
        "extend_prefix_lens": zero.int(),
        "extend_prefix_lens_cpu": [0],
        "extend_start_loc": zero.int(),
    }
    known = {field.name for field in fields(ForwardBatch)}
    return ForwardBatch(**{name: value for name, value in given.items() if name in known})
