"""Model architectures that the converter knows, and how each is stored in a GGUF and in a Hugging Face directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_hybrid.commands.model.errors import DefaultModelError
from sglang_hybrid.commands.model.gguf_metadata import GgufMetadata

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
_ATTENTION_BIASES = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}


@dataclass(frozen=True)
class Architecture:
    key: str  # general.architecture of the GGUF, the prefix of its fields, and Hugging Face's model_type
    title: str  # the name in messages
    model_class: str
    dtype: str  # of the converted weights
    permutes_rotary: bool  # llama.cpp moved the rows of q and k (see gguf_weights.undo_rotary_permutation)
    layer_names: Mapping[str, str]  # from llama.cpp's name behind "blk.N." to Hugging Face's
    fixed_config: Mapping[str, Any] = field(default_factory=dict)  # what the GGUF does not say, because it never varies

    def hugging_face_name(self, name: str) -> str | None:
        """Return Hugging Face's name of a GGUF's tensor, or None if this architecture has no such tensor."""
        if name in _WHOLE_MODEL_NAMES:
            return _WHOLE_MODEL_NAMES[name]
        if name.startswith("blk."):
            _, layer, part = name.split(".", 2)
            if part in self.layer_names:
                return f"model.layers.{layer}.{self.layer_names[part]}"
        return None


LLAMA = Architecture(
    key="llama",
    title="Llama",
    model_class="LlamaForCausalLM",
    # Full precision: a CPU host serves float32, dequantised values do not fit bfloat16 exactly, and the dtype in the
    # config is the dtype that is served. A GPU host asks for less with --dtype.
    dtype="float32",
    permutes_rotary=True,
    layer_names=_LAYER_NAMES,
    fixed_config={"attention_bias": False, "mlp_bias": False},
)
QWEN2 = Architecture(
    key="qwen2",
    title="Qwen2",
    model_class="Qwen2ForCausalLM",
    # As upstream publishes it. Rounding loses less than quantisation did, and float32 would take twice the disk.
    dtype="bfloat16",
    permutes_rotary=False,
    layer_names=_LAYER_NAMES | _ATTENTION_BIASES,
    fixed_config={
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        # Without a version transformers 5 takes a large tokenizer for one of Mistral's with a wrong pattern, and warns.
        "transformers_version": "4.43.1",
    },
)
ARCHITECTURES = {architecture.key: architecture for architecture in (LLAMA, QWEN2)}


def architecture_of(fields: GgufMetadata) -> Architecture:
    """Return the architecture of a GGUF. Raise DefaultModelError for a model that the converter does not know."""
    key = fields.text("general.architecture")
    if key not in ARCHITECTURES:
        known = " and ".join(repr(name) for name in ARCHITECTURES)
        raise DefaultModelError(f"{fields.path} holds a {key!r} model; this converter handles only {known}.")
    scaling = fields.get(f"{key}.rope.scaling.type", "none")
    if scaling != "none":
        raise DefaultModelError(f"{fields.path} uses {scaling!r} rotary scaling, which this converter does not handle.")
    return ARCHITECTURES[key]
