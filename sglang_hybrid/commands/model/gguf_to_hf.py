"""Turn a GGUF (Llama or Qwen2, byte-level BPE tokenizer) into a Hugging Face model directory.

Needs gguf, numpy and tokenizers, and does not touch torch.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt
from rich.console import Console

from sglang_hybrid.commands.model.architectures import Architecture, architecture_of
from sglang_hybrid.commands.model.disk_space import check_disk_space
from sglang_hybrid.commands.model.errors import DefaultModelError
from sglang_hybrid.commands.model.gguf_metadata import GgufMetadata
from sglang_hybrid.commands.model.hf_config import generation_config, model_config
from sglang_hybrid.commands.model.safetensors_file import bytes_per_weight, write_safetensors
from sglang_hybrid.progress import Steps, steps

try:
    from gguf import GGUFReader
except ImportError as error:
    raise DefaultModelError(
        "Reading a GGUF needs the Python package gguf. Install it with: pip install gguf"
    ) from error

from sglang_hybrid.commands.model.gguf_tokenizer import check_tokenizer_is_supported, write_tokenizer
from sglang_hybrid.commands.model.gguf_weights import pieces, shape_of, to_bfloat16

TOKENIZER_AND_CONFIG_BYTES = 16 << 20  # generous: the tokenizer of a vocabulary of 150,000 takes about 11 MB


def convert_gguf(gguf: Path, out: Path, console: Console) -> None:
    """Write config, weights and tokenizer into the existing directory `out`; `console` shows the progress.

    Raise DefaultModelError for a GGUF that cannot be converted. Fields, tensor names, shapes and disk space are checked
    before the first byte is written.
    """
    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError) as error:
        raise DefaultModelError(f"{gguf} cannot be read as a GGUF: {error}") from error
    fields = GgufMetadata(gguf, reader)
    architecture = architecture_of(fields)
    check_tokenizer_is_supported(fields)
    shapes = {_name(gguf, tensor.name, architecture): shape_of(tensor) for tensor in reader.tensors}
    config = model_config(fields, architecture, has_own_head="lm_head.weight" in shapes)
    _check_shapes(gguf, shapes, config, architecture)
    weights = sum(map(math.prod, shapes.values()))
    needed = weights * bytes_per_weight(architecture.dtype) + TOKENIZER_AND_CONFIG_BYTES
    check_disk_space(out, needed, "the converted model")

    with steps(console, weights) as bar:
        bar.say(f"{len(shapes)} tensors to {architecture.dtype}")
        values = _values(reader.tensors, config, architecture, bar)
        write_safetensors(out / "model.safetensors", architecture.dtype, shapes, values)
    write_tokenizer(fields, config["max_position_embeddings"], out)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", generation_config(config))


def _values(
    tensors: list[Any], config: dict[str, Any], architecture: Architecture, bar: Steps
) -> Iterator[npt.NDArray[Any]]:
    heads = {}
    if architecture.permutes_rotary:
        heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    for tensor in tensors:
        for piece in pieces(tensor, heads.get(tensor.name.split(".", 2)[-1])):
            yield to_bfloat16(piece) if architecture.dtype == "bfloat16" else piece
            bar.advance(piece.size)


def _name(gguf: Path, name: str, architecture: Architecture) -> str:
    found = architecture.hugging_face_name(name)
    if found is None:
        # Biases, experts, scaled rotary frequencies: leaving one out would give a model that runs and talks nonsense.
        raise DefaultModelError(
            f"{gguf} has a tensor {name!r} that a plain {architecture.title} does not have; it is not converted."
        )
    return found


def _check_shapes(
    gguf: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any], architecture: Architecture
) -> None:
    query_rows = config["num_attention_heads"] * config["head_dim"]
    key_rows = config["num_key_value_heads"] * config["head_dim"]
    expected = {
        "model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"]),
        "model.norm.weight": (config["hidden_size"],),
        "model.layers.0.self_attn.q_proj.weight": (query_rows, config["hidden_size"]),
        "model.layers.0.self_attn.k_proj.weight": (key_rows, config["hidden_size"]),
    }
    if not config["tie_word_embeddings"]:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    for name, shape in expected.items():
        found = shapes.get(name)
        if found != shape:
            raise DefaultModelError(f"{gguf}: {name} should have shape {shape} by the file's own fields, has {found}.")
    promised = len(architecture.layer_names) * config["num_hidden_layers"]
    in_layers = sum(name.startswith("model.layers.") for name in shapes)
    if in_layers != promised:
        raise DefaultModelError(f"{gguf} has {in_layers} layer tensors, its fields promise {promised}.")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
