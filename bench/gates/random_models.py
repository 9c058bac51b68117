"""Small random models on disk, to test common architectures that differ from the gates' default model.

All have heads of 128 channels. Qwen3 norms queries and keys, Qwen2 has biases, Qwen3-MoE has experts. SGLang's dummy
weights would depend on the order in which a backend's process draws them; weights in files do not.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.synthetic_model import CONFIG_KEY, SMALL, Character, Shape, config

SHAPE = replace(SMALL, heads=8, intermediate=1536)  # 4 layers, hidden 512, 2 KV heads of 128, 4,096 tokens
_SHARPNESS = 2.5  # approximate standard deviation of attention logits: attention is neither flat nor on one token
_LOGITS = 4.0  # approximate standard deviation of output logits: rounding rarely changes the best token
_EXPERTS, _EXPERTS_PER_TOKEN, _EXPERT_WIDTH = 8, 2, 512

ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": _EXPERTS,
        "num_experts_per_tok": _EXPERTS_PER_TOKEN,
        "moe_intermediate_size": _EXPERT_WIDTH,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}


class _Random:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=self._generator).mul_(gain * inputs**-0.5)

    def norm(self, size: int, gain: float = 1.0) -> torch.Tensor:
        drawn: torch.Tensor = gain * (0.5 + torch.rand(size, generator=self._generator))
        return drawn


def write_random_model(target: Path, architecture: str, seed: int = 0, shape: Shape = SHAPE) -> Path:
    random = _Random(seed)
    tensors = {
        "model.embed_tokens.weight": random.matrix(shape.vocabulary, shape.hidden, shape.hidden**0.5),
        "model.norm.weight": random.norm(shape.hidden),
        "lm_head.weight": random.matrix(shape.vocabulary, shape.hidden, _LOGITS),
    }
    for index in range(shape.layers):
        name = f"model.layers.{index}"
        tensors |= _attention(f"{name}.self_attn", architecture, shape, random)
        tensors |= {
            f"{name}.{which}_layernorm.weight": random.norm(shape.hidden) for which in ("input", "post_attention")
        }
        if architecture != "qwen3-moe":
            tensors |= _mlp(f"{name}.mlp", shape.intermediate, shape, random)
            continue
        tensors[f"{name}.mlp.gate.weight"] = random.matrix(_EXPERTS, shape.hidden, 4.0)
        for expert in range(_EXPERTS):
            tensors |= _mlp(f"{name}.mlp.experts.{expert}", _EXPERT_WIDTH, shape, random)
    described = config(shape, Character(), torch.float32) | ARCHITECTURES[architecture]
    del described[CONFIG_KEY]  # this key marks synthetic models, and random models are none
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(described, indent=1))
    return target


def _attention(name: str, architecture: str, shape: Shape, random: _Random) -> dict[str, torch.Tensor]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    has_norms = architecture.startswith("qwen3")
    tensors = {
        # if heads are normed, the gain of the norm sets the sharpness of attention
        f"{name}.q_proj.weight": random.matrix(queries, shape.hidden, 1.0 if has_norms else _SHARPNESS),
        f"{name}.k_proj.weight": random.matrix(keys, shape.hidden),
        f"{name}.v_proj.weight": random.matrix(keys, shape.hidden),
        f"{name}.o_proj.weight": random.matrix(shape.hidden, queries),
    }
    if has_norms:
        tensors[f"{name}.q_norm.weight"] = random.norm(shape.head_dim, _SHARPNESS)
        tensors[f"{name}.k_norm.weight"] = random.norm(shape.head_dim)
    if architecture == "qwen2":
        widths = {"q": queries, "k": keys, "v": keys}
        tensors |= {f"{name}.{part}_proj.bias": random.norm(width) - 1.0 for part, width in widths.items()}
    return tensors


def _mlp(name: str, width: int, shape: Shape, random: _Random) -> dict[str, torch.Tensor]:
    return {
        f"{name}.gate_proj.weight": random.matrix(width, shape.hidden),
        f"{name}.up_proj.weight": random.matrix(width, shape.hidden),
        f"{name}.down_proj.weight": random.matrix(shape.hidden, width),
    }
