"""A small random Qwen3 on disk: head_dim 128 and norms of queries and keys, which the default model does not have.

Dummy weights of SGLang's would depend on the order in which a backend's process draws them; files do not.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.synthetic_model import CONFIG_KEY, SMALL, Character, Shape, config

SHAPE = replace(SMALL, heads=8, intermediate=1536)  # 4 layers, hidden 512, 2 KV heads of 128, 4,096 tokens
_SHARPNESS = 2.5  # standard deviation of attention logits, about: so that attention is neither flat nor one token
_LOGITS = 4.0  # the same of the output: gaps between best tokens that rounding does not close often


def write_random_qwen3(target: Path, seed: int = 0, shape: Shape = SHAPE) -> Path:
    generator = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator).mul_(gain * inputs**-0.5)

    def norm(size: int, gain: float = 1.0) -> torch.Tensor:
        return gain * (0.5 + torch.rand(size, generator=generator))

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {
        "model.embed_tokens.weight": torch.randn(shape.vocabulary, shape.hidden, generator=generator),
        "model.norm.weight": norm(shape.hidden),
        "lm_head.weight": matrix(shape.vocabulary, shape.hidden, _LOGITS),
    }
    for index in range(shape.layers):
        name = f"model.layers.{index}"
        tensors |= {
            f"{name}.input_layernorm.weight": norm(shape.hidden),
            f"{name}.post_attention_layernorm.weight": norm(shape.hidden),
            f"{name}.self_attn.q_proj.weight": matrix(queries, shape.hidden),
            f"{name}.self_attn.k_proj.weight": matrix(keys, shape.hidden),
            f"{name}.self_attn.v_proj.weight": matrix(keys, shape.hidden),
            f"{name}.self_attn.o_proj.weight": matrix(shape.hidden, queries),
            f"{name}.self_attn.q_norm.weight": norm(shape.head_dim, _SHARPNESS),
            f"{name}.self_attn.k_norm.weight": norm(shape.head_dim),
            f"{name}.mlp.gate_proj.weight": matrix(shape.intermediate, shape.hidden),
            f"{name}.mlp.up_proj.weight": matrix(shape.intermediate, shape.hidden),
            f"{name}.mlp.down_proj.weight": matrix(shape.hidden, shape.intermediate),
        }
    described = config(shape, Character(), torch.float32)
    del described[CONFIG_KEY]  # it is none of the synthetic ones
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(described, indent=1))
    return target
