"""A decoder like Llama or Qwen2 in plain torch, whose attention is a function that the caller passes.

One sequence at a time, without a batch and without SGLang: so a program can change what a layer attends to, and needs
only torch, safetensors and the model's directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn import functional

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.scout.predictor import QueryWeights

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
_MLP_TOKENS = 8192  # that the MLP computes at a time: its inner activations are several times as wide as the input

# Computes a layer's attention: (layer, its inputs [n, hidden], rotated queries [n, heads, dim], rotated keys and values
# [n, KV heads, dim]) -> [n, heads, dim].
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class UnknownModel(InputError):
    """A directory without a model that this program can run. The message says what is there, and what can be run."""


@dataclass(frozen=True)
class Shape:
    """Dimensions and constants of a model, from its ``config.json``."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int  # tokens
    norm_eps: float
    rope_theta: float
    ends: tuple[int, ...]  # tokens that end an answer

    @property
    def group(self) -> int:
        """Number of query heads that read the same KV head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Factor of attention logits."""
        return float(self.head_dim**-0.5)


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape in a ``config.json``. Raise UnknownModel if the model computes what PlainModel does not."""
    architectures = config.get("architectures") or ["no architecture"]
    if architectures[0] not in ARCHITECTURES:
        raise UnknownModel(f"config.json has {architectures[0]}: this program runs {' and '.join(ARCHITECTURES)}")
    # newer versions of transformers write one entry for all that is about rotation
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnknownModel(f"config.json has rotation of type {kind}: this program computes the default type only")
    if config.get("use_sliding_window"):
        raise UnknownModel("config.json has use_sliding_window: this program computes full attention only")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise UnknownModel(f"config.json has hidden_act {act}: this program computes silu only")
    heads, ends = config["num_attention_heads"], config.get("eos_token_id")
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if head_dim % 32:
        raise UnknownModel(f"config.json has head_dim {head_dim}: digests of 8 bits need a multiple of 32")
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        ends=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
    )


def read_shape(directory: Path) -> Shape:
    """Return the shape of the model in ``directory``. Raise UnknownModel as ``shape_of`` does."""
    try:
        return shape_of(json.loads((directory / "config.json").read_text()))
    except FileNotFoundError:
        raise UnknownModel(f"{directory} has no config.json: --model takes the directory of a model") from None


class Cache:
    """Keys and values ``[KV heads, tokens, dim]`` of one sequence in every layer, with space for tokens to come."""

    def __init__(self, shape: Shape, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        def zeros() -> list[torch.Tensor]:
            size = (shape.kv_heads, capacity, shape.head_dim)
            return [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.layers)]

        self._keys, self._values = zeros(), zeros()
        self.length = 0  # tokens that all layers have

    def add(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values ``[n, KV heads, dim]`` of the next tokens, and return those of all tokens."""
        end = self.length + len(keys)
        self._keys[layer][:, self.length : end] = keys.transpose(0, 1)
        self._values[layer][:, self.length : end] = values.transpose(0, 1)
        return self._keys[layer][:, :end], self._values[layer][:, :end]

    def first(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values of the first ``tokens``."""
        return self._keys[layer][:, :tokens], self._values[layer][:, :tokens]


def causal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend from all tokens of a sequence: queries ``[n, heads, dim]``, keys and values ``[KV heads, n, dim]``.

    A single query is that of the last token, whatever the number of keys.
    """
    attended = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], is_causal=len(queries) > 1, scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[0],
    )  # fmt: skip
    return attended[0].transpose(0, 1)


class PlainModel:
    """The weights of a model, and what its layers compute beside attention."""

    def __init__(self, shape: Shape, weights: Mapping[str, torch.Tensor], positions: int) -> None:
        """``weights``: by their names in the model's files. ``positions``: number of tokens of the longest sequence."""
        self.shape, self._weights = shape, weights
        self._embeddings = weights["model.embed_tokens.weight"]
        self.device, self.dtype = self._embeddings.device, self._embeddings.dtype
        channel = torch.arange(0, shape.head_dim, 2, device=self.device).float()
        position = torch.arange(positions, device=self.device).float()
        angles = position[:, None] * (1.0 / shape.rope_theta ** (channel / shape.head_dim))
        self._rotary = torch.cat((angles.cos(), angles.sin()), dim=1)

    @classmethod
    def load(
        cls, directory: Path, positions: int, device: str | torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> PlainModel:
        """Read the model in ``directory``. Raise UnknownModel if there is none that this program can run."""
        shape, weights = read_shape(directory), dict[str, torch.Tensor]()
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise UnknownModel(f"{directory} has no weights: this program reads *.safetensors")
        for file in files:
            with safe_open(file, "pt", device=str(device)) as tensors:
                weights |= {name: tensors.get_tensor(name).to(dtype) for name in tensors.keys()}  # noqa: SIM118
        return cls(shape, weights, positions)

    def query_weights(self, layer: int) -> QueryWeights:
        """Return what predicts the queries of ``layer`` from another layer's inputs."""
        part, shape = self._of_layer(layer), self.shape
        return QueryWeights(
            part["input_layernorm.weight"], shape.norm_eps, part["self_attn.q_proj.weight"],
            part.get("self_attn.q_proj.bias"), shape.head_dim, None, 0.0, self._rotary, True,
        )  # fmt: skip

    def forward(self, tokens: Sequence[int], first: int, attend: Attend) -> torch.Tensor:
        """Run all layers over ``tokens`` from position ``first`` on, and return the last one's output ``[n, hidden]``.

        ``attend`` computes attention. It gets keys and values of these tokens only, and must know earlier ones itself.
        """
        hidden = self._embeddings[torch.tensor(list(tokens), device=self.device)]
        positions = first + torch.arange(len(tokens), device=self.device)
        for layer in range(self.shape.layers):
            queries, keys, values = self._projected(layer, hidden, positions)
            hidden = self._finished(layer, hidden, attend(layer, hidden, queries, keys, values))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits ``[n, vocabulary]`` of the next tokens for the output of ``forward``."""
        head = self._weights.get("lm_head.weight", self._embeddings)  # models with tied embeddings have no other
        return functional.linear(self._normed(hidden, self._weights["model.norm.weight"]), head).float()

    def run(
        self, tokens: Sequence[int], cache: Cache, last_queries: dict[int, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Attend to everything: a prompt, or one token behind those in ``cache``. Return logits of the next token.

        ``last_queries`` gets the last token's query ``[1, heads, dim]`` of every layer.
        """
        assert cache.length == 0 or len(tokens) == 1, "a prompt is not the beginning, or more than one token follows it"

        def attend(
            layer: int, _inputs: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            if last_queries is not None:
                last_queries[layer] = queries[-1:]
            return causal(queries, *cache.add(layer, keys, values), self.shape.scale)

        hidden = self.forward(tokens, cache.length, attend)
        cache.length += len(tokens)
        return self.logits(hidden[-1:])[0]

    def new_cache(self, capacity: int) -> Cache:
        return Cache(self.shape, capacity, self.device, self.dtype)

    def _of_layer(self, layer: int) -> _Part:
        return _Part(self._weights, f"model.layers.{layer}.")

    def _projected(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        part, dim = self._of_layer(layer), self.shape.head_dim
        inputs = self._normed(hidden, part["input_layernorm.weight"])
        queries, keys, values = (
            part.linear(f"self_attn.{name}_proj", inputs).unflatten(-1, (-1, dim)) for name in "qkv"
        )
        rotary = self._rotary[positions]
        return reference.rotate(queries, rotary, True), reference.rotate(keys, rotary, True), values

    def _finished(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        part = self._of_layer(layer)
        hidden = hidden + part.linear("self_attn.o_proj", attended.flatten(1).to(self.dtype))
        for some in hidden.split(_MLP_TOKENS):
            inputs = self._normed(some, part["post_attention_layernorm.weight"])
            inner = functional.silu(part.linear("mlp.gate_proj", inputs)) * part.linear("mlp.up_proj", inputs)
            some += part.linear("mlp.down_proj", inner)
        return hidden

    def _normed(self, hidden: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return reference.rms_unit(hidden, self.shape.norm_eps).to(self.dtype) * gain


@dataclass(frozen=True)
class _Part:
    """The weights whose names begin with ``prefix``."""

    weights: Mapping[str, torch.Tensor]
    prefix: str

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[self.prefix + name]

    def get(self, name: str) -> torch.Tensor | None:
        return self.weights.get(self.prefix + name)

    def linear(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs, self[f"{name}.weight"], self.get(f"{name}.bias"))
