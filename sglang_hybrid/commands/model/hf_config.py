"""Makes config.json and generation_config.json from the fields of a GGUF."""

from typing import Any

import numpy as np

from sglang_hybrid.commands.model.architectures import Architecture
from sglang_hybrid.commands.model.gguf_metadata import GgufMetadata


def model_config(fields: GgufMetadata, architecture: Architecture, has_own_head: bool) -> dict[str, Any]:
    """Return config.json. ``has_own_head``: the output projection is a tensor of its own, not the embedding table."""
    key = architecture.key
    hidden_size = fields.integer(f"{key}.embedding_length")
    heads = fields.integer(f"{key}.attention.head_count")
    eos_id = fields.integer("tokenizer.ggml.eos_token_id")
    return {
        "architectures": [architecture.model_class],
        "model_type": key,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer(f"{key}.feed_forward_length"),
        "num_hidden_layers": fields.integer(f"{key}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get(f"{key}.attention.head_count_kv", heads)),
        "head_dim": int(fields.get(f"{key}.attention.key_length", hidden_size // heads)),
        "max_position_embeddings": fields.integer(f"{key}.context_length"),
        "rms_norm_eps": _shortest_decimal(fields.require(f"{key}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest_decimal(fields.get(f"{key}.rope.freq_base", 10000.0)),
        "vocab_size": len(fields.require("tokenizer.ggml.tokens")),
        "tie_word_embeddings": not has_own_head,
        "hidden_act": "silu",
        **architecture.fixed_config,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_id,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", eos_id),
        "dtype": architecture.dtype,
        "torch_dtype": architecture.dtype,  # the key's name before transformers 5
    }


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return generation_config.json with token ids only.

    Padding ends a text too: Qwen2 pads with the token that ends a document outside of a chat.
    """
    eos_id, pad_id = config["eos_token_id"], config["pad_token_id"]
    return {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": eos_id if pad_id == eos_id else [eos_id, pad_id],
        "pad_token_id": pad_id,
    }


def _shortest_decimal(value: float) -> float:
    """Return the shortest decimal of a float32 of a GGUF: 1e-05 must not become 9.999999747378752e-06 in JSON."""
    return float(str(np.float32(value)))
