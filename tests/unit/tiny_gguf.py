"""Tiny GGUF files of the model families that the converter knows, which convert in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
CONTEXT, ROPE_THETA, RMS_EPSILON = 128, 100000.0, 1e-5
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens in GGUF
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"

Tensors = dict[str, npt.NDArray[np.float32]]


def tiny_vocabulary() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), "he"]


def tiny_tensors(rows: int | None = None, biases: bool = False, own_head: bool = False) -> Tensors:
    """Return random weights. ``rows`` is the length of the embedding table, by default the size of the vocabulary."""
    random = np.random.default_rng(7)
    per_layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (FEED_FORWARD, HIDDEN),
        "ffn_up.weight": (FEED_FORWARD, HIDDEN),
        "ffn_down.weight": (HIDDEN, FEED_FORWARD),
    }
    if biases:
        per_layer |= {
            "attn_q.bias": (HEADS * HEAD_DIM,),
            "attn_k.bias": (KV_HEADS * HEAD_DIM,),
            "attn_v.bias": (KV_HEADS * HEAD_DIM,),
        }
    table = (rows or len(tiny_vocabulary()), HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": table, "output_norm.weight": (HIDDEN,)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in per_layer.items()}
    if own_head:
        shapes["output.weight"] = table
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_tiny_gguf(
    path: Path,
    tensors: Tensors | None = None,
    architecture: str = "llama",
    tokenizer_model: str = "gpt2",
    text_split: str = "smollm",
    quantised: str = "",
    more_tokens: Mapping[str, int] | None = None,
    merges: Sequence[str] = ("h e",),
) -> Path:
    """Write a GGUF file, and return its path.

    ``quantised`` names a tensor that is stored in Q4_1. ``more_tokens`` follow the vocabulary, each with its type.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(RMS_EPSILON)
    writer.add_rope_freq_base(ROPE_THETA)
    kinds = {token: CONTROL if token in SPECIAL_TOKENS else NORMAL for token in tiny_vocabulary()}
    kinds |= more_tokens or {}
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(text_split)
    writer.add_token_list(list(kinds))
    writer.add_token_types(list(kinds.values()))
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if architecture == "qwen2":
        writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weights in (tensors or tiny_tensors()).items():
        if name == quantised:
            q4_1 = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quants.quantize(weights, q4_1), raw_dtype=q4_1)
        else:
            writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
