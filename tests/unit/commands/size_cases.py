"""Models and machines that the tests of ``sglang-hybrid size`` share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_hybrid.commands.size.memory import Machine, Sizing
from sglang_hybrid.commands.size.model_shape import shape_of
from sglang_hybrid.commands.size.quantities import GB
from sglang_hybrid.config import load_config

LLAMA: dict[str, Any] = {  # Llama-3.1-8B
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MOE: dict[str, Any] = {  # Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip


def sizing(
    *settings: str, gpu_gb: int = 24, host_gb: int = 128, gpus: int = 1, tokens: int = 33 * 1024, **config: Any
) -> Sizing:
    machine = Machine(gpu_gb * GB, host_gb * GB, gpus)
    return Sizing(shape_of(LLAMA | config, "Llama"), machine, load_config(None, settings), tokens)


def write_safetensors_header(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write a safetensors file with a header and no values: ``size`` reads headers only."""
    entries = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in tensors.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
