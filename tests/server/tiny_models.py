"""Write models with random weights, a few megabytes each, for what the default model cannot show.

The default model has three KV heads, which two ranks cannot divide, and no experts. The models have no tokenizer:
serve them with ``--skip-tokenizer-init``, ask with ``input_ids``, and compare ``output_ids`` and logprobs. Weights are
large enough that attention is far from uniform and every token of the prompt matters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 3, 256, 4, 2, 64, 512, 1024
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_WIDTH = 4, 2, 128

Tensors = dict[str, torch.Tensor]

_SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
LLAMA = _SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN3_MOE = _SHAPE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "moe_intermediate_size": EXPERT_WIDTH,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


class _Random:
    """Source of random matrices whose outputs have about the norm of their inputs, times ``gain``."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(outputs, inputs, generator=self._generator) * gain * inputs**-0.5
        return drawn


def write_llama(target: Path, seed: int = 0) -> Path:
    random = _Random(seed)
    tensors = _outer(random)
    for layer in range(LAYERS):
        tensors |= _attention(layer, random) | _mlp(f"model.layers.{layer}.mlp", INTERMEDIATE, random)
    return _write(target, LLAMA, tensors)


def write_qwen3_moe(target: Path, seed: int = 0) -> Path:
    random = _Random(seed)
    tensors = _outer(random)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= _attention(layer, random)
        tensors |= {f"{name}.self_attn.{part}_norm.weight": torch.ones(HEAD_DIM) for part in "qk"}
        tensors[f"{name}.mlp.gate.weight"] = random.matrix(EXPERTS, HIDDEN, gain=4)
        for expert in range(EXPERTS):
            tensors |= _mlp(f"{name}.mlp.experts.{expert}", EXPERT_WIDTH, random)
    return _write(target, QWEN3_MOE, tensors)


def _outer(random: _Random) -> Tensors:
    return {
        "model.embed_tokens.weight": random.matrix(VOCABULARY, HIDDEN, gain=HIDDEN**0.5),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random.matrix(VOCABULARY, HIDDEN, gain=2),
    }


def _attention(layer: int, random: _Random) -> Tensors:
    name = f"model.layers.{layer}"
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
        f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{name}.self_attn.q_proj.weight": random.matrix(queries, HIDDEN, gain=2),
        f"{name}.self_attn.k_proj.weight": random.matrix(keys, HIDDEN),
        f"{name}.self_attn.v_proj.weight": random.matrix(keys, HIDDEN),
        f"{name}.self_attn.o_proj.weight": random.matrix(HIDDEN, queries, gain=2),
    }


def _mlp(name: str, width: int, random: _Random) -> Tensors:
    return {
        f"{name}.gate_proj.weight": random.matrix(width, HIDDEN),
        f"{name}.up_proj.weight": random.matrix(width, HIDDEN),
        f"{name}.down_proj.weight": random.matrix(HIDDEN, width, gain=2),
    }


def _write(target: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target
