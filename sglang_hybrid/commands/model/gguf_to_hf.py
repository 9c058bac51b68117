"""Turn a GGUF (Llama architecture, byte-level BPE tokenizer) into a Hugging Face model directory.

Needs gguf, numpy, safetensors and tokenizers, and does not touch torch.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from sglang_hybrid.commands.model.errors import DefaultModelError
from sglang_hybrid.commands.model.gguf_metadata import GgufMetadata
from sglang_hybrid.commands.model.gguf_tokenizer import check_tokenizer_is_supported, write_tokenizer

try:
    from gguf import GGUFReader
    from gguf.quants import dequantize
except ImportError as error:
    raise DefaultModelError(
        "Reading a GGUF needs the Python package gguf. Install it with: pip install gguf"
    ) from error

Weights = npt.NDArray[np.float32]

BYTES_PER_WEIGHT = 4
TOKENIZER_AND_CONFIG_BYTES = 16 << 20  # generous: the tokenizer of a 50k vocabulary takes about 4 MB

_WHOLE_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf(gguf: Path, out: Path, report: Callable[[str], None]) -> None:
    """Write config, weights and tokenizer into the existing directory `out`.

    Everything that can be refused is refused before the first byte is written.
    """
    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError) as error:
        raise DefaultModelError(f"{gguf} cannot be read as a GGUF: {error}") from error
    fields = GgufMetadata(gguf, reader)
    _check_model_is_supported(fields)
    check_tokenizer_is_supported(fields)
    names = {tensor.name: _hugging_face_name(gguf, tensor.name) for tensor in reader.tensors}
    config = _model_config(fields, has_own_head="output.weight" in names)
    _check_disk_space(out, sum(int(tensor.n_elements) for tensor in reader.tensors))

    report(f"dequantising {len(names)} tensors of {gguf.name}")
    weights = {names[tensor.name]: _hugging_face_weights(tensor, config) for tensor in reader.tensors}
    _check_shapes(gguf, weights, config)
    report("writing weights and tokenizer")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})  # transformers insists on the format
    write_tokenizer(fields, config["max_position_embeddings"], out)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {key: config[key] for key in config if key.endswith("_token_id")})


def undo_rotary_permutation(weights: Weights, heads: int) -> Weights:
    """Reorder the rows of a q or k projection from llama.cpp's rotary layout to Hugging Face's.

    Rotary embedding turns pairs of a head's channels. With D channels a head, llama.cpp pairs neighbours
    (0,1) (2,3) ..., Hugging Face pairs halves (0,D/2) (1,D/2+1) ...; the GGUF has its rows moved accordingly.
    """
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _hugging_face_weights(tensor: Any, config: dict[str, Any]) -> Weights:
    weights: Weights = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if tensor.name.endswith(".attn_q.weight"):
        return undo_rotary_permutation(weights, config["num_attention_heads"])
    if tensor.name.endswith(".attn_k.weight"):
        return undo_rotary_permutation(weights, config["num_key_value_heads"])
    return weights


def _hugging_face_name(gguf: Path, name: str) -> str:
    if name in _WHOLE_MODEL_NAMES:
        return _WHOLE_MODEL_NAMES[name]
    if name.startswith("blk."):
        _, layer, part = name.split(".", 2)
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}"
    # Biases, experts, scaled rotary frequencies: leaving one out would give a model that runs and talks nonsense.
    raise DefaultModelError(f"{gguf} has a tensor {name!r} that a plain Llama does not have; it is not converted.")


def _model_config(fields: GgufMetadata, has_own_head: bool) -> dict[str, Any]:
    hidden_size = fields.integer("llama.embedding_length")
    heads = fields.integer("llama.attention.head_count")
    eos_id = fields.integer("tokenizer.ggml.eos_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("llama.feed_forward_length"),
        "num_hidden_layers": fields.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(fields.get("llama.attention.key_length", hidden_size // heads)),
        "max_position_embeddings": fields.integer("llama.context_length"),
        "rms_norm_eps": _shortest_decimal(fields.require("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest_decimal(fields.get("llama.rope.freq_base", 10000.0)),
        "vocab_size": len(fields.require("tokenizer.ggml.tokens")),
        "tie_word_embeddings": not has_own_head,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_id,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", eos_id),
        # Full precision in the file and in the config: a CPU host serves float32, dequantised values do not fit
        # bfloat16 exactly, and what one reads here is what one gets. A GPU host asks for less with --dtype.
        "dtype": "float32",
        "torch_dtype": "float32",  # the key's name before transformers 5
    }


def _check_model_is_supported(fields: GgufMetadata) -> None:
    architecture = fields.text("general.architecture")
    if architecture != "llama":
        raise DefaultModelError(f"{fields.path} holds a {architecture!r} model; this converter handles only 'llama'.")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise DefaultModelError(f"{fields.path} uses {scaling!r} rotary scaling, which this converter does not handle.")


def _check_shapes(gguf: Path, weights: dict[str, Weights], config: dict[str, Any]) -> None:
    head_dim = config["head_dim"]
    expected = {
        "model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"]),
        "model.layers.0.self_attn.q_proj.weight": (config["num_attention_heads"] * head_dim, config["hidden_size"]),
        "model.layers.0.self_attn.k_proj.weight": (config["num_key_value_heads"] * head_dim, config["hidden_size"]),
    }
    for name, shape in expected.items():
        found = weights[name].shape if name in weights else None
        if found != shape:
            raise DefaultModelError(f"{gguf}: {name} should have shape {shape} by the file's own fields, has {found}.")
    per_layer = len(_LAYER_NAMES) * config["num_hidden_layers"]
    found_per_layer = sum(name.startswith("model.layers.") for name in weights)
    if found_per_layer != per_layer:
        raise DefaultModelError(f"{gguf} has {found_per_layer} layer tensors, its fields promise {per_layer}.")


def _check_disk_space(out: Path, weight_count: int) -> None:
    needed = weight_count * BYTES_PER_WEIGHT + TOKENIZER_AND_CONFIG_BYTES
    free = shutil.disk_usage(out).free
    if free < needed:
        raise DefaultModelError(
            f"Not enough disk space for the converted model in {out.parent}: {needed / 1e6:.0f} MB needed, "
            f"{free / 1e6:.0f} MB free. Make room, or choose another place with --cache-dir or SGLANG_HYBRID_CACHE."
        )


def _shortest_decimal(value: float) -> float:
    """GGUF stores float32; 1e-05 must not become 9.999999747378752e-06 on the way to JSON."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
